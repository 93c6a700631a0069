"""From the name of a model to a config, a tokenizer, weights and a runner.

Each step is a function, so that a process which holds no weights (`ParallelLLM`) or a part of them
(`RankLLM`) takes the steps it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import get_args

import torch

from lopa.decoding.round_cost import RoundCost, RoundCostLike
from lopa.engine.base import TOKEN_BUDGET
from lopa.engine.prompts import token_id
from lopa.errors import CheckpointError, ConfigError
from lopa.kernels.compilation import Progress
from lopa.kernels.quantize import Quantize, quantize_layer
from lopa.models import checkpoint
from lopa.models.config import ModelConfig
from lopa.models.families import family_named
from lopa.models.files import resolve
from lopa.models.part import WHOLE, Part
from lopa.models.tokenizer import Tokenizer
from lopa.models.transformer import Transformer
from lopa.runner.backend import choose_backend, prepare
from lopa.runner.device import default_cache_tokens, memory_beside_cache
from lopa.runner.paged import PagedRunner, Reuse


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """How to load a model: the arguments of `LLM`, which says what each means."""

    adapter: str | Path | None = None
    dtype: str = "auto"
    eos_token_id: int | Sequence[int] | None = None
    mask_token_id: int | None = None
    quantize: str | None = None
    backend: str = "auto"
    cache_tokens: int | None = None
    prefix_reuse: Reuse = "exact"
    warmup: int = 0
    round_cost: RoundCostLike | None = None

    def __post_init__(self) -> None:
        if self.prefix_reuse not in get_args(Reuse):
            choices = ", ".join(get_args(Reuse))
            raise ConfigError(f"prefix_reuse must be {choices}: got {self.prefix_reuse!r}")
        if self.cache_tokens is not None and self.cache_tokens < 1:
            raise ConfigError(f"cache_tokens must be at least 1: got {self.cache_tokens}")
        if not 0 <= self.warmup <= TOKEN_BUDGET:
            raise ConfigError(f"warmup must be between 0 and {TOKEN_BUDGET}: got {self.warmup}")
        self.given_cost()

    def given_cost(self) -> RoundCost | None:
        return None if self.round_cost is None else RoundCost.of(self.round_cost)


def with_special_ids(config: ModelConfig, options: LoadOptions) -> ModelConfig:
    """The config with the EOS and mask ids that the caller gave."""
    eos_ids, mask_id = config.eos_ids, config.mask_id
    if options.eos_token_id is not None:
        given = options.eos_token_id
        ids = given if isinstance(given, list | tuple) else [given]
        eos_ids = tuple(token_id("eos_token_id", i, config.vocab_size) for i in ids)
    if options.mask_token_id is not None:
        mask_id = options.mask_token_id
    mask_id = token_id("the mask token", mask_id, config.vocab_size)
    if mask_id in eos_ids:
        raise ConfigError(f"token {mask_id} cannot be both mask and EOS")
    return replace(config, eos_ids=eos_ids, mask_id=mask_id)


def load_tokenizer(name: str, config: ModelConfig) -> Tokenizer | None:
    """None where the folder has none. A dummy's tokens are bytes."""
    if not name.startswith(checkpoint.DUMMY):
        return Tokenizer.from_folder(resolve(name))
    specials = {"<|mask|>": config.mask_id}
    specials |= {f"<|eos{n or ''}|>": i for n, i in enumerate(config.eos_ids)}
    return Tokenizer.byte_level(specials)


def turn_ends(config: ModelConfig, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Tokens that end a chat turn: they end an answer as an EOS does."""
    if tokenizer is None:
        return ()
    found = map(tokenizer.token_id, family_named(config.family).turn_ends)
    return tuple(i for i in found if i is not None)


def load_weights(
    name: str,
    config: ModelConfig,
    options: LoadOptions,
    device: torch.device,
    dtype: torch.dtype,
    progress: checkpoint.Progress | None = None,
    part: Part = WHOLE,
    quantize: Quantize | None = None,
) -> Transformer:
    """Each layer is quantized before the next one is read; of a part, so that it has own scales."""
    finish = None if quantize is None else partial(quantize_layer, kind=quantize)
    if name.startswith(checkpoint.DUMMY):
        if options.adapter is not None:
            raise CheckpointError("a dummy model takes no adapter: leave it out")
        return checkpoint.dummy(
            config, device=device, dtype=dtype, seed=0, part=part, finish=finish
        )
    adapter = None if options.adapter is None else resolve(options.adapter, "adapter")
    return checkpoint.load(
        resolve(name),
        config,
        device=device,
        dtype=dtype,
        adapter=adapter,
        progress=progress,
        part=part,
        finish=finish,
    )


def make_runner(
    model: Transformer,
    options: LoadOptions,
    *,
    backend: str,
    agree: Callable[[int], int] = int,  # the least of what several ranks have
    share: int = 1,  # processes that share the device's memory
    compiling: Progress | None = None,  # of kernels
) -> PagedRunner:
    """The runner of a loaded model; the KV cache takes the memory that is left."""
    config, parameter = model.config, next(model.parameters())
    device, dtype = parameter.device, parameter.dtype
    make = choose_backend(backend, config, device)
    memory = memory_beside_cache(options.cache_tokens, config, device, dtype)
    prepare(model, make, agree(memory) // share, compiling)
    tokens = options.cache_tokens
    if tokens is None:
        tokens = max(1, default_cache_tokens(config, device, dtype) // share)
    return PagedRunner(
        model,
        agree(tokens),
        reuse=options.prefix_reuse,
        backend=make,
        warmup=options.warmup,
        compiling=compiling,
    )
