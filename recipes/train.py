"""Train the built-in model from scratch, within a budget of wall-clock time.

    PYTHONPATH=src python3 recipes/train.py --config recipes/tiny.toml --minutes 16 --out runs/tiny

The clock starts with the process and keeps running through start-up, evaluations and
checkpoints; when it has run out, the learning rate has just reached zero, and a last evaluation
and the export follow. OUT/model is a folder for `lopa.LLM`, rewritten with every checkpoint.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import platform
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
if not __package__:  # run as a file
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import tokenizers
import torch
from torch import Tensor

from lopa.errors import LopaError
from lopa.models.tokenizer import Tokenizer
from lopa.models.transformer import Transformer
from lopa.runner.device import choose_device
from recipes import files, human, objective, schedule
from recipes import tokenizer as bpe
from recipes.evaluate import Evaluation
from recipes.folder import export, model_config
from recipes.noise import Noisy, corrupt
from recipes.pool import Pool, pack, sample, unpack
from recipes.progress import Progress
from recipes.settings import Settings, load
from recipes.tokenizer import EOS_ID, MASK_ID

_START = time.monotonic()
_SAY_EVERY = 5.0  # seconds between progress lines
_RECOVERIES = 3  # times a loss that is not a number may be answered with the last checkpoint


class Trainer:
    """One run. `out` holds checkpoint.pt, metrics.jsonl and model/, the exported folder."""

    def __init__(
        self,
        settings: Settings,
        *,
        out: Path,
        minutes: float,
        steps: int | None = None,
        device: str = "auto",
        compiled: bool | None = None,
        resume: bool = False,
        data: Path | None = None,
        began: float | None = None,
    ) -> None:
        self.settings, self.out = settings, out
        self.budget, self.steps = minutes * 60, steps
        self.began = time.monotonic() if began is None else began
        self.device = choose_device(device)
        self.cuda = self.device.type == "cuda"
        self.compute = torch.bfloat16 if self.cuda else torch.float32
        self.step, self.before = 0, 0.0  # `before`: seconds spent by earlier processes
        self.stopping = False
        self.recoveries, self.caution = 0, 1.0
        self.progress = Progress()
        self.parts = 1  # a batch is forwarded in so many parts
        if self.cuda:
            torch.cuda.set_device(self.device)
            torch.set_float32_matmul_precision("high")
            # The other fast kernels take no bias, or have not always computed it well.
            torch.backends.cuda.enable_cudnn_sdp(False)

        saved = self._read_checkpoint() if resume else None
        pairs = human.read(data, settings.data.human_rows) if data is not None else []
        self.built = self._tokenizer(pairs, reuse=resume)
        # Data workers start first: they need seconds to import what they use.
        self.pool = Pool(
            settings.data,
            self.folder / "tokenizer.json",
            self.device,
            saved["next_chunk"] if saved else 0,
        )
        try:
            self._prepare(pairs, saved, compiled)
        except BaseException:
            self.pool.close()
            raise

    @property
    def folder(self) -> Path:
        return self.out / "model"

    def _prepare(
        self, pairs: list[tuple[str, str]], saved: dict[str, Any] | None, compiled: bool | None
    ) -> None:
        settings, seed = self.settings, self.settings.run.seed
        self.human: Tensor | None = None
        if pairs:
            packed, dropped = pack(
                self.built,
                [(*pair, len(settings.data.tasks)) for pair in pairs],
                settings.data.length,
            )
            self.progress.say(f"human-written rows: {len(packed)}, too long: {dropped}")
            self.human = torch.from_numpy(packed).to(self.device)
        tokenizer = Tokenizer.from_folder(self.folder)
        assert tokenizer is not None
        self.evaluation = Evaluation(settings, self.built, tokenizer)

        config = model_config(settings.model, self.built.get_vocab_size(), MASK_ID, EOS_ID)
        self.model = Transformer(config)
        objective.initialise(self.model, torch.Generator().manual_seed(seed))
        self.model.to(self.device)
        self.average = Transformer(config).to(self.device).requires_grad_(False).eval()
        self.average.load_state_dict(self.model.state_dict())
        self.optimizers = schedule.optimizers(self.model, settings.optim)
        self.generator = torch.Generator(self.device).manual_seed(seed)
        if saved is not None:
            self._restore(saved)
            self.before = saved["seconds"]
        self.forward: Callable[..., Tensor] = objective.weighted_sum
        self.compiled = self.cuda if compiled is None else compiled
        if self.compiled:
            self.forward = torch.compile(objective.weighted_sum, dynamic=False)
        self.progress.say(
            f"{config.parameters / 1e6:.2f} M parameters, vocabulary {config.vocab_size}, "
            f"{self.device}, compile {'on' if self.compiled else 'off'}"
        )

    def _tokenizer(self, pairs: list[tuple[str, str]], reuse: bool) -> tokenizers.Tokenizer:
        path = self.folder / "tokenizer.json"
        if not (reuse and path.is_file()):
            began = time.monotonic()
            texts = vocabulary_texts(self.settings)
            texts += [text for pair in pairs[:: max(1, len(pairs) // 20_000)] for text in pair]
            bpe.save(bpe.train(texts, self.settings.model.vocab_size), self.folder)
            self.progress.say(
                f"tokenizer from {len(texts)} texts in {time.monotonic() - began:.1f} s"
            )
        return tokenizers.Tokenizer.from_file(str(path))

    # -- time ---------------------------------------------------------------------------------

    @property
    def seconds(self) -> float:
        """Spent so far, by this process and those it continues."""
        return self.before + time.monotonic() - self.began

    @property
    def spent(self) -> float:
        """Share of the budget that is gone."""
        by_time = self.seconds / self.budget
        return max(by_time, self.step / self.steps) if self.steps else by_time

    # -- checkpoints --------------------------------------------------------------------------

    def save(self) -> None:
        content = {
            "model": self.model.state_dict(),
            "average": self.average.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "noise": self.generator.get_state(),
            "step": self.step,
            "seconds": self.seconds,
            "next_chunk": self.pool.next_chunk,
            "settings": asdict(self.settings),
        }
        files.write(self.out / "checkpoint.pt", lambda path: torch.save(content, path))
        export(self.average, self.folder)

    def _read_checkpoint(self) -> dict[str, Any]:
        path = self.out / "checkpoint.pt"
        if not path.is_file():
            raise LopaError(f"--resume: there is no {path}; leave --resume out to begin")
        saved: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        for section in ("model", "data"):
            ours = asdict(self.settings)[section]
            for name in ("vocab_size", "hidden_size", "layers", "heads", "kv_heads", "length"):
                if saved["settings"][section].get(name) != ours.get(name):
                    raise LopaError(f"--resume: {path} was made with another {section}.{name}")
        return saved

    def _restore(self, saved: dict[str, Any]) -> None:
        self.model.load_state_dict(saved["model"])
        self.average.load_state_dict(saved["average"])
        for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        self.generator.set_state(saved["noise"])
        self.step = saved["step"]

    def _recover(self) -> None:
        """Go back to the last checkpoint, at half the rate."""
        self.recoveries += 1
        if self.recoveries > _RECOVERIES:
            raise LopaError("the loss is not a number again and again: lower optim.lr")
        self.caution /= 2
        step = self.step
        self._restore(self._read_checkpoint())
        self.progress.say(
            f"step {step}: the loss is not a number; back to step {self.step} at half the rate"
        )

    # -- a step -------------------------------------------------------------------------------

    def batch(self) -> Noisy:
        count = self.settings.optim.batch
        share = self.settings.data.human_share if self.human is not None else 0.0
        rows = self.pool.sample(count - int(share * count), self.generator)
        if self.human is not None:
            rows = torch.cat([rows, sample(self.human, count - len(rows), self.generator)])
        tokens, prompt, answer, _ = unpack(rows)
        return corrupt(
            tokens, prompt, answer, self.model.config.mask_id, self.settings.noise, self.generator
        )

    def backward(self, noisy: Noisy) -> Tensor:
        """Gradients of the batch's weighted mean loss, which is returned."""
        weights = noisy.weights / noisy.weights.sum()
        total = torch.zeros((), device=self.device)
        size = math.ceil(len(weights) / self.parts)
        for part in range(0, len(weights), size):
            rows = slice(part, part + size)
            with torch.autocast(self.device.type, self.compute, enabled=self.cuda):
                loss = self.forward(
                    self.model,
                    noisy.tokens[rows],
                    noisy.targets[rows],
                    weights[rows],
                    objective.attention_bias(noisy.sees[rows], self.compute),
                )
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return total

    def robust_backward(self, noisy: Noisy) -> Tensor:
        """`backward`; falls back to smaller parts, and to no compilation, where it must."""
        while True:
            try:
                return self.backward(noisy)
            except torch.OutOfMemoryError:
                if self.parts >= len(noisy.tokens):
                    raise
                self.parts *= 2
                self.progress.say(f"out of memory: batches in {self.parts} parts from now on")
            except Exception as error:
                if not self.compiled:
                    raise
                self.compiled, self.forward = False, objective.weighted_sum
                self.progress.say(
                    f"compilation failed, going on without: {str(error).strip()[:400]}"
                )
            for optimizer in self.optimizers:
                optimizer.zero_grad(set_to_none=True)
            if self.cuda:
                torch.cuda.empty_cache()

    def advance(self) -> Tensor:
        """One optimiser step; the loss stays on the device."""
        optim = self.settings.optim
        schedule.set_rate(
            self.optimizers, self.caution * schedule.factor(self.step, self.spent, optim)
        )
        loss = self.robust_backward(self.batch())
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), optim.clip)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        keep = min(optim.ema, self.step / (self.step + 10))
        with torch.no_grad():
            torch._foreach_lerp_(
                list(self.average.parameters()), list(self.model.parameters()), 1 - keep
            )
        return loss

    # -- the run ------------------------------------------------------------------------------

    def log(self, kind: str, **values: Any) -> None:
        line = {"kind": kind, "step": self.step, "seconds": round(self.seconds, 2), **values}
        with (self.out / "metrics.jsonl").open("a", encoding="utf-8") as metrics:
            metrics.write(json.dumps(line) + "\n")

    def evaluate(self, final: bool = False) -> dict[str, Any]:
        """Never ends a run: what goes wrong here is printed and left out."""
        began = time.monotonic()
        try:
            found = self.evaluation.run(self.average, final)
        except Exception:
            self.progress.say(f"evaluation failed:\n{traceback.format_exc()}")
            return {}
        self.log("eval", **found)
        shown = "  ".join(f"{k} {v:.3f}" for k, v in found.items() if not k.startswith("problems_"))
        self.progress.say(
            f"evaluation at step {self.step} ({time.monotonic() - began:.1f} s): {shown}"
        )
        return found

    def run(self, stop_after: float | None = None) -> bool:
        """Train until the budget is spent; True if it is, False if asked to stop before.

        `stop_after`: minutes after which this process saves and stops, to be resumed.
        """
        self.progress.say(f"waiting for data: {self.seconds:.1f} s since the start")
        self.pool.wait()
        self.save()  # something to recover to, and proof that it can be written
        self.progress.say(f"first step at {self.seconds:.1f} s, with {self.pool.filled} rows")
        run, batch = self.settings.run, self.settings.optim.batch
        tokens = batch * self.settings.data.length
        mark, mark_step = time.monotonic(), self.step
        losses: list[float] = []  # since the last report
        saved = evaluated = time.monotonic()
        limit = math.inf if stop_after is None else self.began + stop_after * 60
        pending: Tensor | None = None
        while self.spent < 1.0 and not self.stopping and time.monotonic() < limit:
            loss = self.advance()
            self.pool.refill()
            # Wait for the step before this one: the device stays busy, the clock stays honest.
            value = pending.item() if pending is not None else None
            pending = loss
            if value is not None and not math.isfinite(value):
                self._recover()
                pending, losses = None, []
                continue
            if value is not None:
                losses.append(value)
            now = time.monotonic()
            if losses and (now - mark >= _SAY_EVERY or self.step == 2):
                rate = (self.step - mark_step) * tokens / (now - mark)
                self.report(sum(losses) / len(losses), rate)
                mark, mark_step, losses = now, self.step, []
            if now - evaluated >= run.evaluate_every and self.spent < 0.97:
                self.evaluate()
                evaluated = time.monotonic()
                mark, mark_step = evaluated, self.step
            if now - saved >= run.save_every:
                self.save()
                saved = time.monotonic()
        complete = self.spent >= 1.0
        if losses:
            self.report(sum(losses) / len(losses), math.nan)
        self.save()
        if complete:
            self.evaluate(final=True)
        self.progress.say(
            f"{'done' if complete else 'stopped'} at step {self.step} after {self.seconds:.0f} s; "
            f"{self.pool.received} rows generated, {self.pool.dropped} too long; "
            f"model in {self.folder}" + ("" if complete else "; continue with --resume")
        )
        return complete

    def report(self, loss: float, rate: float) -> None:
        lr = self.optimizers[0].param_groups[0]["lr"]
        rate_known = None if math.isnan(rate) else round(rate)
        self.log("train", loss=round(loss, 5), lr=lr, tokens_per_second=rate_known)
        left = max(0.0, self.budget - self.seconds)
        memory = f"  {torch.cuda.max_memory_allocated() / 2**30:.0f} GiB" if self.cuda else ""
        self.progress.update(
            min(1.0, self.spent),
            f"step {self.step:6d}  {self.spent:6.1%}  {self.seconds:5.0f} s ({left:.0f} left)  "
            f"loss {loss:.4f}  lr {lr:.2e}  {rate / 1e3:.0f} k tokens/s  "
            f"{self.pool.filled / 1e3:.0f} k rows{memory}",
        )

    def close(self) -> None:
        self.progress.close()
        self.pool.close()


def vocabulary_texts(settings: Settings) -> list[str]:
    source = importlib.import_module(settings.data.source)
    texts = []
    for task in settings.data.tasks:
        for seed in range(settings.data.vocabulary_problems):
            problem = source.generate(task, seed, "train")
            texts += [problem.prompt, problem.answer]
    return texts


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="recipes/train.py", description=__doc__.split("\n")[0])
    parser.add_argument("--config", type=Path, help="TOML file with the settings")
    parser.add_argument("--out", type=Path, required=True, help="folder of the run")
    parser.add_argument("--minutes", type=float, default=16.0, help="budget of wall-clock time")
    parser.add_argument("--steps", type=int, help="end after so many steps, if that is sooner")
    parser.add_argument(
        "--stop-after",
        type=float,
        metavar="MINUTES",
        help="save and stop this process early, to be continued with --resume",
    )
    parser.add_argument("--resume", action="store_true", help="continue from OUT/checkpoint.pt")
    parser.add_argument("--data", type=Path, help="folder of human-written solutions to mix in")
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help="torch.compile the loss; by default on CUDA only",
    )
    parser.add_argument(
        "--set",
        action="append",
        metavar="SECTION.NAME=VALUE",
        default=[],
        help="change a setting; may be repeated",
    )
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> int:
    options = arguments(given)
    print(
        f"python {platform.python_version()}, torch {torch.__version__}, "
        f"tokenizers {tokenizers.__version__}, {os.cpu_count()} cores, "
        f"CUDA {torch.cuda.get_device_name() if torch.cuda.is_available() else 'not available'}"
    )
    # Until there is something to save, a signal just ends the process and its workers.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        trainer = Trainer(
            load(options.config, options.set),
            out=options.out,
            minutes=options.minutes,
            steps=options.steps,
            device=options.device,
            compiled=options.compile,
            resume=options.resume,
            data=options.data,
            began=_START,
        )
    except LopaError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1

    def stop(number: int, frame: object) -> None:
        # Asked twice by a person: at once. (`timeout` sends its SIGTERM twice by itself.)
        if trainer.stopping and number == signal.SIGINT:
            raise KeyboardInterrupt
        trainer.stopping = True
        trainer.progress.say("stopping: the checkpoint is written first")

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    try:
        trainer.run(options.stop_after)
    except LopaError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        trainer.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
