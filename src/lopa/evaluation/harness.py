"""lm-evaluation-harness on this engine: `--model lopa`, and the harness's own command line.

    python -m lopa.evaluation.harness --model lopa --model_args model=tiny,branches=7 --tasks gsm8k

takes every option of `lm_eval`. `model_args` are those of `LLM` (model, adapter, dtype,
quantize) and the fields of `DecodeConfig`, or preset=NAME; batch_size is how many are decoded at
once. Stop strings and room for the answer are the task's unless they are given; the room is rounded
up to whole blocks. With `--apply_chat_template` the engine applies the model's template. Tasks that
score code with code_eval run it by this project's judge; unsafe_code=true is --unsafe-code.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import lm_eval.models  # noqa: F401  first: what is registered before it would hide the harness's own models
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

from lopa.config import options_of
from lopa.engine.llm import LLM
from lopa.engine.prompts import Text
from lopa.errors import ConfigError
from lopa.evaluation import code_eval
from lopa.evaluation.judge import allow_unsafe_code
from lopa.evaluation.likelihood import log_likelihood

_LLM_OPTIONS = ("adapter", "device", "dtype", "quantize")
_CHAT = "<|messages|>"  # before messages that pass through the harness as a text

code_eval.install()


@register_model("lopa")
class HarnessLM(LM):  # type: ignore[misc]  # the harness has no types
    """A model of the harness: answers by this engine's decoders, likelihoods by sampling masks."""

    def __init__(
        self,
        model: str = "tiny",
        preset: str | None = None,
        batch_size: int | str = 1,
        mask_samples: int = 32,  # of masks, for a likelihood
        max_batch_size: int | None = None,  # the harness passes it on; decoding needs none
        unsafe_code: bool = False,  # run generated code without isolation
        **options: Any,
    ) -> None:
        super().__init__()
        try:
            self.at_once = int(batch_size)
        except ValueError:
            raise ConfigError(f"batch_size must be a number: got {batch_size!r}") from None
        given = {n: options.pop(n, None) for n in _LLM_OPTIONS}
        loading: dict[str, Any] = {n: str(v) for n, v in given.items() if v is not None}
        if unsafe_code:
            allow_unsafe_code()
        self.llm = LLM(model, **loading)
        self.mask_samples, self.preset = mask_samples, preset
        self.options = {n: v for n, v in options.items() if v is not None}
        self.config = self.llm.decode_config(preset, **self.options)  # a wrong option shows now

    @property
    def tokenizer_name(self) -> str:
        return self.llm.name

    def chat_template(self, chat_template: bool | str = False) -> str:
        tokenizer = self.llm.tokenizer
        if tokenizer is None or tokenizer.chat_template is None or isinstance(chat_template, str):
            raise ConfigError("this model has no such template: leave --apply_chat_template out")
        return str(tokenizer.chat_template)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """A text that holds the messages: the harness passes nothing else on."""
        if not add_generation_prompt:
            raise ConfigError("a task that begins the answer cannot be asked by chat")
        return _CHAT + json.dumps(chat_history, ensure_ascii=False)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        answers = [""] * len(requests)
        kinds: dict[str, list[int]] = {}  # requests that ask for the same
        for index, request in enumerate(requests):
            code_eval.remember(request.doc)
            kinds.setdefault(repr(request.args[1]), []).append(index)
        for indices in kinds.values():
            config = self._config(requests[indices[0]].args[1])
            prompts = [_prompt(requests[i].args[0]) for i in indices]
            outputs = self.llm.generate_as_completed(prompts, config, max_running=self.at_once)
            for place, output in outputs:
                answers[indices[place]] = output.text
                self.cache_hook.add_partial(
                    "generate_until", requests[indices[place]].args, output.text
                )
        return answers

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        return [self._likelihood(*request.args) for request in requests]

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        return [self._likelihood("\n", request.args[0])[0] for request in requests]

    def _likelihood(self, context: str, continuation: str) -> tuple[float, bool]:
        before = self.llm.encode(_prompt(context) or "\n", whole=False)
        after = self.llm.encode(continuation, whole=False)
        return log_likelihood(self.llm, before, after, mask_samples=self.mask_samples)

    def _config(self, asked: dict[str, Any]) -> Any:
        options = dict(self.options)
        until = asked.get("until") or []
        options.setdefault("stop", [until] if isinstance(until, str) else list(until))
        if asked.get("do_sample") and asked.get("temperature"):
            options.setdefault("temperature", float(asked["temperature"]))
        if "max_gen_toks" in asked and self.preset is None and "max_new_tokens" not in options:
            room = int(asked["max_gen_toks"])
            if "block_size" in options_of(self.config.decoder, self.config.window):
                room = -(-room // self.config.block_size) * self.config.block_size
            options["max_new_tokens"] = room
        return self.llm.decode_config(self.preset, **options)


def _prompt(context: str) -> Text:
    """What `apply_chat_template` made of messages, as messages again; other text as it is."""
    if not context.startswith(_CHAT):
        return context
    messages: list[dict[str, str]] = json.loads(context.removeprefix(_CHAT))
    return messages


def main() -> None:
    from lm_eval.__main__ import cli_evaluate

    sys.argv = ["lm_eval", *with_device(sys.argv[1:])]
    cli_evaluate()


def with_device(arguments: list[str]) -> list[str]:
    """The arguments of a run with the device that is here: the harness's own default is cuda:0."""
    named = {argument.partition("=")[0] for argument in arguments}
    asks = bool(named & {"--model", "-M"}) and "--device" not in named
    return [*arguments, "--device", "auto"] if asks else arguments


if __name__ == "__main__":
    main()
