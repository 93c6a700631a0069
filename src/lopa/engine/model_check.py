"""What a model would run as, from its config and its headers alone: no weights are read.

What is in its way is the error that loading it would give.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from lopa.errors import ConfigError
from lopa.models import checkpoint, lora
from lopa.models.config import ModelConfig
from lopa.models.families import family_named, settings_for
from lopa.models.files import headers_of, read_json
from lopa.models.part import degrees
from lopa.presets import PRESETS
from lopa.runner.backend import choose_backend
from lopa.runner.device import choose_device, choose_dtype, free_bytes
from lopa.runner.kv_cache import token_bytes

# Free memory of an empty device.
_GPUS = {"RTX 4090": 23 * 2**30, "L40S": 44 * 2**30, "A100, H100": 79 * 2**30, "H200": 139 * 2**30}
_CACHE_SHARE = 0.8  # of what the weights leave free, as `default_cache_tokens` has it
_LEAST_CACHE = 4096  # tokens: a model with room for fewer does not fit
_TOKENIZERS = ("tokenizer.json", "vocab.json")


@dataclass(frozen=True, slots=True)
class Fit:
    """How many devices of a kind hold the model, and the tokens that their cache then holds."""

    device: str
    memory_bytes: int
    tensor_parallel: int | None  # None: no degree that cuts this model is enough
    cache_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCheck:
    model: str
    adapter: str | None
    adapters: list[str]  # published for a model of this name
    family: str
    verified: str
    parameters: int
    dtype: str
    weight_bytes: int
    kv_bytes_per_1k: int  # of 1,024 tokens
    context: int
    tokenizer: bool
    chat_template: bool
    settings: dict[str, Any]  # of the decoder that is the default
    decoders: list[str]
    presets: list[str]  # that fit it
    device: str  # that would be taken here
    backend: str  # there
    gpu_backend: str | None  # on a CUDA device; None: not known, since triton is not installed
    here: Fit
    fits: list[Fit]


def check_model(name: str, *, adapter: str | None = None, dtype: str = "auto") -> ModelCheck:
    """Read the headers of a folder, a hub id, a built-in or a dummy model; a LopaError says what
    is in the way."""
    if name.startswith(checkpoint.DUMMY):
        if adapter is not None:
            raise ConfigError("a dummy model takes no adapter: leave it out")
        return _describe(name, checkpoint.model_config(name), None, dtype)
    with headers_of(name) as folder:
        config = checkpoint.read_config(folder)
        config, targets, _ = checkpoint.check(folder, config)
        if adapter is not None:
            with headers_of(adapter, "adapter") as other:
                lora.check(other, targets)
        return _describe(name, config, folder, dtype, adapter)


def _describe(
    name: str, config: ModelConfig, folder: Path | None, dtype: str, adapter: str | None = None
) -> ModelCheck:
    family, used = family_named(config.family), choose_dtype(dtype, config.dtype)
    device = choose_device("auto")
    weights, per_token = config.parameters * used.itemsize, token_bytes(config, used)
    settings = settings_for(config, None, {}).settings()

    def fit(device: str, memory: int, most: int) -> Fit:
        return _fit(device, memory, weights, per_token, [n for n in degrees(config) if n <= most])

    return ModelCheck(
        model=name,
        adapter=adapter,
        adapters=[a for a, base in family.adapters.items() if Path(base).name == Path(name).name],
        family=family.name,
        verified=family.verified,
        parameters=config.parameters,
        dtype=str(used).removeprefix("torch."),
        weight_bytes=weights,
        kv_bytes_per_1k=1024 * per_token,
        context=config.max_positions,
        tokenizer=folder is None or any((folder / file).exists() for file in _TOKENIZERS),
        chat_template=folder is not None and _has_template(folder),
        settings=settings,
        decoders=list(family.decoders),
        presets=[preset for preset in PRESETS if _takes(config, preset)],
        device=str(device),
        backend=_backend(config, device),
        gpu_backend=_backend(config, torch.device("cuda")) if find_spec("triton") else None,
        here=fit(str(device), free_bytes(device) or 0, 1),
        fits=[fit(gpu, memory, 8) for gpu, memory in _GPUS.items()],
    )


def _fit(device: str, memory: int, weights: int, per_token: int, parts: list[int]) -> Fit:
    for count in parts:
        tokens = int(_CACHE_SHARE * (memory - weights / count) / (per_token / count))
        if tokens >= _LEAST_CACHE:
            return Fit(device, memory, count, tokens)
    return Fit(device, memory, None, 0)


def _takes(config: ModelConfig, preset: str) -> bool:
    try:
        settings_for(config, preset, {})
    except ConfigError:
        return False
    return True


def _backend(config: ModelConfig, device: torch.device) -> str:
    return "sdpa" if isinstance(choose_backend("auto", config, device), partial) else "triton"


def _has_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").exists():
        return True
    path = folder / "tokenizer_config.json"
    return path.exists() and bool(read_json(path).get("chat_template"))
