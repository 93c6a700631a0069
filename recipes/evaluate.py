"""How good the model is so far: masked-token loss, exact answers and tokens per forward."""

from __future__ import annotations

import importlib
import time
from typing import Any

import tokenizers
import torch
from torch import Tensor

from lopa.config import DecodeConfig
from lopa.decoding.decoder import Decoder
from lopa.engine.scheduler import Scheduler
from lopa.engine.session import Session
from lopa.models.tokenizer import Tokenizer
from lopa.models.transformer import Transformer
from lopa.runner.paged import PagedRunner
from recipes.noise import corrupt
from recipes.objective import attention_bias, token_losses
from recipes.pool import pack, unpack
from recipes.settings import Settings

_BATCH = 64
_SETTINGS: dict[str, dict[str, Any]] = {
    "d2f": {"decoder": "d2f", "threshold": 0.9},
    "d2f_block": {"decoder": "d2f", "threshold": 0.9, "attention": "block"},
    "lopa7": {"decoder": "lopa", "threshold": 0.9, "branches": 7},
}


class Evaluation:
    """The evaluation problems of a run, made once."""

    def __init__(
        self, settings: Settings, built: tokenizers.Tokenizer, tokenizer: Tokenizer
    ) -> None:
        self.settings = settings
        self.tokenizer = tokenizer
        data, run = settings.data, settings.run
        self.source = importlib.import_module(data.source)
        self.score = importlib.import_module(data.scoring).score
        self.problems: dict[str, list[Any]] = {}
        self.rows: dict[str, Tensor] = {}
        for number, task in enumerate(data.tasks):
            problems = [
                self.source.generate(task, seed, "eval") for seed in range(run.evaluate_rows)
            ]
            packed, _ = pack(built, [(p.prompt, p.answer, number) for p in problems], data.length)
            self.problems[task] = problems
            self.rows[task] = torch.from_numpy(packed)

    def losses(self, model: Transformer) -> dict[str, float]:
        """Mean loss of the masked positions, by task, under always the same noise."""
        device = next(model.parameters()).device
        found = {}
        for task, rows in self.rows.items():
            # Drawn on the CPU, so that every device sees the same masks.
            generator = torch.Generator().manual_seed(12345)
            total = count = 0.0
            for part in torch.split(rows, _BATCH):
                tokens, prompt, answer, _ = unpack(part)
                noisy = corrupt(
                    tokens, prompt, answer, model.config.mask_id, self.settings.noise, generator
                )
                masked = (noisy.weights > 0)[:, 1:].to(device)
                with torch.no_grad():
                    losses = token_losses(
                        model,
                        noisy.tokens.to(device),
                        noisy.targets.to(device),
                        attention_bias(noisy.sees.to(device), torch.float32),
                    )
                total += float((losses * masked).sum())
                count += float(masked.sum())
            found[task] = total / max(1.0, count)
        return found

    def decode(
        self, model: Transformer, name: str, task: str, count: int, seconds: float
    ) -> dict[str, float]:
        """Exact answers and tokens per forward on the first problems, as time allows."""
        new_tokens = self.settings.run.new_tokens
        config = DecodeConfig(max_new_tokens=new_tokens, **_SETTINGS[name])
        runner = PagedRunner(model, model.config.max_positions)
        deadline = time.monotonic() + seconds
        done = right = tokens = rounds = 0
        for problem in self.problems[task][:count]:
            ids = self.tokenizer.encode(problem.prompt)
            decoder = Decoder(
                config,
                ids,
                mask_id=model.config.mask_id,
                eos_ids=model.config.eos_ids,
                shift=model.config.shift,
            )
            output = None
            for event in Scheduler(runner).stream(Session(decoder, self.tokenizer)):
                output = event.output
                if time.monotonic() > deadline:
                    break
            if output is None:  # out of time
                break
            done += 1
            right += bool(self.score(problem, output.text))
            tokens += output.tokens
            rounds += output.rounds
        if not done:
            return {}
        return {"accuracy": right / done, "tpf": tokens / max(1, rounds), "problems": done}

    def run(self, model: Transformer, final: bool) -> dict[str, Any]:
        """Everything, flat: loss_TASK, accuracy_TASK_DECODER, tpf_TASK_DECODER.

        On the way it is kept to a few seconds; the final one takes more problems and decoders.
        """
        run = self.settings.run
        found: dict[str, Any] = {f"loss_{t}": loss for t, loss in self.losses(model).items()}
        count = run.evaluate_final if final else run.evaluate_problems
        seconds = run.final_seconds if final else run.evaluate_seconds
        for task in self.problems:
            names = _SETTINGS if final else ("d2f", "lopa7") if task == "words" else ("d2f",)
            for name in names:
                for key, value in self.decode(model, name, task, count, seconds).items():
                    found[f"{key}_{task}_{name}"] = value
        return found
