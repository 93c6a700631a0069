"""Backends by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

import torch

from lopa.errors import DeviceError
from lopa.kernels.compilation import Progress
from lopa.models.config import ModelConfig
from lopa.models.transformer import Transformer
from lopa.runner.attention import reference_batch, sdpa_batch
from lopa.runner.backend_torch import TorchBackend
from lopa.runner.kv_cache import KVCache

MakeBackend = Callable[[Transformer, KVCache], TorchBackend]
_HEAD_DIMS = (16, 32, 64, 128, 256)  # that the tensor cores take
# Elements of an expert's row of weights: whole copies of 16 bytes in every dtype, fp8 and int8 too.
_EXPERT_WIDTH = 16


def choose_backend(name: str, config: ModelConfig, device: torch.device) -> MakeBackend:
    """`auto` is `triton` where it runs, else `sdpa`."""
    reason = why_not_triton(config, device)
    if name == "reference":
        return partial(TorchBackend, attention=reference_batch)
    if name == "sdpa" or (name == "auto" and reason is not None):
        return partial(TorchBackend, attention=sdpa_batch)
    if name not in ("auto", "triton"):
        raise DeviceError(f"no backend {name!r}: choose from auto, triton, sdpa, reference")
    if reason is not None:
        raise DeviceError(f"the backend triton {reason}: choose sdpa or reference")
    from lopa.runner.backend_triton import TritonBackend

    return TritonBackend


def prepare(
    model: Transformer, backend: MakeBackend, memory: int, compiling: Progress | None = None
) -> None:
    """Compress weights for a backend that reads them so, if `memory` (bytes) suffices."""
    made = backend.func if isinstance(backend, partial) else backend
    if made is not TorchBackend:
        from lopa.kernels.compressed_linear import compress_linears

        compress_linears(model, memory, compiling)


def why_not_triton(config: ModelConfig, device: torch.device) -> str | None:
    """What the backend triton lacks here; None: nothing."""
    if device.type != "cuda":
        return f"needs a CUDA device, and this one is {device}"
    if find_spec("triton") is None:
        return "needs the package triton, which is not installed"
    if config.head_dim not in _HEAD_DIMS:
        return f"has no kernel for heads of {config.head_dim}"
    mixture = config.mixture
    if mixture is not None and (
        mixture.inner % _EXPERT_WIDTH or config.hidden_size % _EXPERT_WIDTH
    ):
        return f"has kernels for experts of widths that {_EXPERT_WIDTH} divides"
    return None
