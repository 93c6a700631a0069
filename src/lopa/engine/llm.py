"""`LLM`: a model, its tokenizer and a runner behind `generate` and `stream`."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias, get_args, overload

import torch
from torch import Tensor

from lopa.config import AttentionName, DecodeConfig
from lopa.decoding.branch_budget import RoundCost
from lopa.decoding.decoder import Decoder
from lopa.engine import cost_measurement as calibration
from lopa.engine.scheduler import MAX_RUNNING, TOKEN_BUDGET, Engine
from lopa.engine.session import Event, Output, Session
from lopa.errors import CheckpointError, ConfigError, PromptError
from lopa.kernels.quantize import check_quantize
from lopa.kernels.quantize import quantize as quantize_model
from lopa.models import checkpoint
from lopa.models.config import ModelConfig
from lopa.models.families import family_named, settings_for
from lopa.models.files import resolve
from lopa.models.tokenizer import Tokenizer
from lopa.runner.backend import choose_backend, prepare
from lopa.runner.base import Runner
from lopa.runner.device import (
    check_fits,
    choose_device,
    choose_dtype,
    default_cache_tokens,
    memory_beside_cache,
)
from lopa.runner.paged import PagedRunner, Reuse
from lopa.runner.reference import raw_logits

Messages: TypeAlias = Sequence[Mapping[str, str]]
Prompt: TypeAlias = str | Messages | Sequence[int]


class LLM:
    """A diffusion language model, loaded.

    model: "tiny", a folder, a hub id, or dummy:NAME for random weights of a known shape.
    adapter: a PEFT LoRA (folder or hub id), merged on loading.
    quantize: "fp8" or "int8": the linear layers' precision.
    backend: "triton" (fused kernels and graphs), "sdpa" or "reference"; by default the fastest
    that the device has. On Hopper in bf16, "triton" also keeps the large weights compressed
    without loss, where that takes at most a quarter of the memory beside weights and cache: rounds
    of up to 64 tokens are faster so, and rounded otherwise.
    cache_tokens: room of the KV cache; by default what the device's memory allows.
    prefix_reuse: share the cache of prompts between requests. "exact" where the same tokens come
    out (block attention), "approximate" also under full attention, "off".
    warmup: get ready for rounds of up to so many tokens before the first request; without it each
    size of a round is made ready when it first comes. Only the triton backend has use for it.
    round_cost: (tokens, seconds) points of a round's time, for branches "auto"; measured on first
    use by default. The same points give the same answers again, on any device.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        adapter: str | Path | None = None,
        device: str = "auto",
        dtype: str = "auto",
        eos_token_id: int | Sequence[int] | None = None,
        mask_token_id: int | None = None,
        quantize: str | None = None,
        backend: str = "auto",
        cache_tokens: int | None = None,
        prefix_reuse: Reuse = "exact",
        warmup: int = 0,
        round_cost: Sequence[tuple[int, float]] | None = None,
        progress: checkpoint.Progress | None = None,
    ) -> None:
        if prefix_reuse not in get_args(Reuse):
            raise ConfigError(
                f"prefix_reuse must be {', '.join(get_args(Reuse))}: got {prefix_reuse!r}"
            )
        self.name = str(model)
        self.device = choose_device(device)
        config = checkpoint.model_config(model)
        self.dtype = choose_dtype(dtype, config.dtype)
        self.quantize = None if quantize is None else check_quantize(quantize, self.device)
        self.config = config
        self._check_fits()
        if self.name.startswith(checkpoint.DUMMY):
            self._load_dummy(config, adapter)
        else:
            self._load_folder(resolve(model), config, adapter, progress)
        changes: dict[str, Any] = {}
        if eos_token_id is not None:
            many = isinstance(eos_token_id, list | tuple)
            ids: Any = eos_token_id if many else [eos_token_id]
            changes["eos_ids"] = tuple(self._known_id("eos_token_id", i) for i in ids)
        if mask_token_id is not None:
            changes["mask_id"] = self._known_id("mask_token_id", mask_token_id)
        self.config = replace(self.config, **changes)
        self._known_id("the mask token", self.config.mask_id)
        if self.config.mask_id in self.config.eos_ids:
            raise ConfigError(f"token {self.config.mask_id} cannot be both mask and end of text")
        if cache_tokens is not None and cache_tokens < 1:
            raise ConfigError(f"cache_tokens must be at least 1: got {cache_tokens}")
        if not 0 <= warmup <= TOKEN_BUDGET:
            raise ConfigError(f"warmup must be between 0 and {TOKEN_BUDGET}: got {warmup}")
        self._warmup = warmup
        self.runner = self._make_runner(cache_tokens, prefix_reuse, backend)
        self._round_cost = None
        if round_cost is not None:
            self._round_cost = RoundCost(tuple((int(t), float(s)) for t, s in round_cost))
        self._turn_ends: tuple[int, ...] = ()
        if self.tokenizer is not None and eos_token_id is None:
            ends = map(self.tokenizer.token_id, family_named(self.config.family).turn_ends)
            self._turn_ends = tuple(i for i in ends if i is not None)

    # What a model that is spread over ranks does otherwise: see `lopa.parallel`.

    def _check_fits(self) -> None:
        check_fits(self.config, self.device, self.dtype)

    def _make_runner(self, cache_tokens: int | None, reuse: Reuse, backend: str) -> Runner:
        self.model.config = self.config
        make = choose_backend(backend, self.config, self.device)
        memory = memory_beside_cache(cache_tokens, self.config, self.device, self.dtype)
        prepare(self.model, make, memory)
        tokens = cache_tokens or default_cache_tokens(self.config, self.device, self.dtype)
        return PagedRunner(self.model, tokens, reuse=reuse, backend=make, warmup=self._warmup)

    def _make_session(self, decoder: Decoder, ids: Sequence[int], limit: int | None) -> Session:
        return Session(self.runner, self.tokenizer, decoder, ids, limit)

    @property
    def _read_to(self) -> torch.device:
        """Where weights are read to."""
        return self.device

    def _load_dummy(self, config: ModelConfig, adapter: str | Path | None) -> None:
        if adapter is not None:
            raise CheckpointError("a dummy model takes no adapter: leave it out")
        self._load_weights(None, config, None, None)
        specials = {"<|mask|>": config.mask_id}
        specials |= {f"<|eos{n or ''}|>": i for n, i in enumerate(config.eos_ids)}
        self.tokenizer: Tokenizer | None = Tokenizer.byte_level(specials)

    def _load_folder(
        self,
        folder: Path,
        config: ModelConfig,
        adapter: str | Path | None,
        progress: checkpoint.Progress | None,
    ) -> None:
        self.tokenizer = Tokenizer.from_folder(folder)
        self._load_weights(
            folder, config, resolve(adapter, "adapter") if adapter is not None else None, progress
        )

    def _load_weights(
        self,
        folder: Path | None,  # None: random weights
        config: ModelConfig,
        adapter: Path | None,
        progress: checkpoint.Progress | None,
    ) -> None:
        where: Any = {"device": self._read_to, "dtype": self.dtype}
        if folder is None:
            self.model = checkpoint.dummy(config, **where, seed=0)
        else:
            self.model = checkpoint.load(
                folder, config, **where, adapter=adapter, progress=progress
            )
        self.config = self.model.config
        if self.quantize is not None:
            quantize_model(self.model, self.quantize)

    def close(self) -> None:
        """End what this model runs outside this process: nothing, here."""

    # -- decoding -----------------------------------------------------------------------------

    @overload
    def generate(self, prompts: str, config: DecodeConfig | None = None) -> Output: ...
    @overload
    def generate(self, prompts: Messages, config: DecodeConfig | None = None) -> Output: ...
    @overload
    def generate(self, prompts: Sequence[int], config: DecodeConfig | None = None) -> Output: ...
    @overload
    def generate(self, prompts: list[str], config: DecodeConfig | None = None) -> list[Output]: ...
    @overload
    def generate(
        self, prompts: Sequence[Messages], config: DecodeConfig | None = None
    ) -> list[Output]: ...
    @overload
    def generate(
        self, prompts: Sequence[Sequence[int]], config: DecodeConfig | None = None
    ) -> list[Output]: ...
    def generate(self, prompts: Any, config: DecodeConfig | None = None) -> Output | list[Output]:
        """Decode one prompt (text, chat messages or token ids), or a list of prompts.

        Prompts are decoded one by one: an answer never depends on what else was asked. For
        throughput see `generate_together`.
        """
        if _is_many(prompts):
            return [self._generate(prompt, config) for prompt in prompts]
        return self._generate(prompts, config)

    def generate_together(
        self,
        prompts: Sequence[Prompt],
        config: DecodeConfig | None = None,
        *,
        max_running: int = MAX_RUNNING,
        token_budget: int = TOKEN_BUDGET,
    ) -> Iterator[tuple[int, Output]]:
        """(index, output) of many prompts, `max_running` at once, in order of completion."""
        engine = self.engine(max_running=max_running, token_budget=token_budget)
        sessions: dict[int, int] = {}
        encoded = [self.encode(prompt) for prompt in prompts]  # a bad one is found at once

        def begin() -> Iterator[Session]:
            for index, ids in enumerate(encoded):
                session = self.session(ids, config)
                sessions[id(session)] = index
                yield session

        for session in engine.run(begin()):
            assert session.output is not None
            yield sessions.pop(id(session)), session.output

    def engine(self, *, max_running: int = MAX_RUNNING, token_budget: int = TOKEN_BUDGET) -> Engine:
        """What runs many of this model's sessions at once."""
        return Engine(self.runner, max_running=max_running, token_budget=token_budget)

    def stream(self, prompt: Prompt, config: DecodeConfig | None = None) -> Iterator[Event]:
        """One event a round, as it happens; the last one carries the output."""
        session = self.session(prompt, config)
        try:
            while (event := session.step(ahead=True)) is not None:
                yield event
        finally:
            session.close()

    def decode_config(self, preset: str | None = None, **given: Any) -> DecodeConfig:
        """Settings for this model: what is given, else what suits its family."""
        return settings_for(self.config, preset, given)

    def session(
        self,
        prompt: Prompt,
        config: DecodeConfig | None = None,
        *,
        limit: int | None = None,
        cost: RoundCost | None = None,
    ) -> Session:
        """A request to be driven by hand, round by round.

        `limit` cuts its answer short; `cost` is what rounds cost for branches "auto", in place of
        what they do here.
        """
        config = config or self.decode_config()
        family = family_named(self.config.family)
        family.check(self.config, config)
        ids = self.encode(prompt)
        if len(ids) + config.max_new_tokens > self.config.max_positions:
            raise PromptError(
                f"the prompt has {len(ids)} tokens and {config.max_new_tokens} are to be added, "
                f"but this model's context holds {self.config.max_positions}: "
                "shorten the prompt or ask for fewer new tokens"
            )
        eos = self.config.eos_ids + (self._turn_ends if config.early_stop else ())
        measured = config.branches == "auto" and config.objective == "speed"
        decoder = Decoder(
            config,
            ids,
            mask_id=self.config.mask_id,
            eos_ids=eos,
            shift=self.config.shift,
            aligned=self.config.trained_block is not None,
            cost=(cost or self.round_cost) if measured else None,
        )
        return self._make_session(decoder, ids, limit)

    @property
    def round_cost(self) -> RoundCost:
        """What a round costs here. Measured on first use: no other session may be running then."""
        if self._round_cost is None:
            self._round_cost = calibration.measure(self.runner, self.config, self.decode_config)
        return self._round_cost

    def forward(
        self,
        token_ids: Sequence[int],
        *,
        attention: AttentionName = "full",
        prompt_len: int | None = None,
        block_size: int | None = None,
    ) -> Tensor:
        """Raw logits [tokens, vocab] of one sequence, no cache, not shifted, in fp32.

        Under `block` attention the first `prompt_len` tokens are block 0; models that count blocks
        from position 0 need no `prompt_len`.
        """
        if attention not in get_args(AttentionName):
            raise ConfigError(f"attention must be full or block: got {attention!r}")
        if block_size is not None and block_size < 1:
            raise ConfigError(f"block_size must be at least 1: got {block_size}")
        ids = self._checked(token_ids)
        if not 0 < len(ids) <= self.config.max_positions:
            raise PromptError(f"give 1 to {self.config.max_positions} tokens: got {len(ids)}")
        aligned = self.config.trained_block is not None
        if attention == "block" and (block_size is None or (prompt_len is None and not aligned)):
            raise ConfigError("block attention needs block_size, and prompt_len for this model")
        return raw_logits(self.model, ids, attention, prompt_len or 0, block_size or 1)

    def encode(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt: text, chat messages, or ids as they are."""
        is_chat = isinstance(prompt, list | tuple) and any(isinstance(p, Mapping) for p in prompt)
        if (isinstance(prompt, str) or is_chat) and self.tokenizer is None:
            raise PromptError("this model has no tokenizer: give the prompt as token ids")
        given: Any = prompt
        if self.tokenizer is not None and isinstance(prompt, str):
            given = self.tokenizer.encode(prompt)
        elif self.tokenizer is not None and is_chat:
            given = self.tokenizer.chat(given)
        ids = self._checked(given)
        if not ids:
            raise PromptError("the prompt is empty: give at least one token")
        return ids

    def _generate(self, prompt: Prompt, config: DecodeConfig | None) -> Output:
        session = self.session(prompt, config)
        try:
            while session.step(ahead=True) is not None:
                pass
        finally:
            session.close()
        assert session.output is not None
        return session.output

    def _checked(self, token_ids: Sequence[int]) -> list[int]:
        if isinstance(token_ids, bytes | Mapping) or not hasattr(token_ids, "__iter__"):
            raise PromptError("a prompt is text, a list of chat messages or a list of token ids")
        return [self._known_id("token id", i) for i in token_ids]

    def _known_id(self, what: str, value: object) -> int:
        size = self.config.vocab_size
        try:
            if isinstance(value, bool):
                raise TypeError
            value = operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            raise PromptError(f"{what} must be a whole number: got {value!r}") from None
        if not 0 <= value < size:
            raise PromptError(f"{what} {value} is outside the vocabulary of {size}")
        return value


def _is_many(prompts: object) -> bool:
    """A list of prompts, as against one prompt that is itself a list of ids or messages."""
    if not isinstance(prompts, list | tuple) or not prompts:
        return False
    first = prompts[0]
    return isinstance(first, str) or (hasattr(first, "__len__") and not isinstance(first, Mapping))
