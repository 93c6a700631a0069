"""Backends by name: which step runs a batch on a device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

import torch

from lopa.errors import DeviceError
from lopa.models.config import ModelConfig
from lopa.models.transformer import Transformer
from lopa.runner.attention import reference_batch, sdpa_batch
from lopa.runner.backend_torch import Step
from lopa.runner.kv_cache import Pages

MakeStep = Callable[[Transformer, Pages], Step]
_HEAD_DIMS = (16, 32, 64, 128, 256)  # what the matrix units take


def choose_step(name: str, config: ModelConfig, device: torch.device) -> MakeStep:
    """`auto` is `triton` where it runs, else `sdpa`."""
    reason = _no_triton(config, device)
    if name == "reference":
        return partial(Step, attention=reference_batch)
    if name == "sdpa" or (name == "auto" and reason is not None):
        return partial(Step, attention=sdpa_batch)
    if name not in ("auto", "triton"):
        raise DeviceError(f"no backend {name!r}: choose from auto, triton, sdpa, reference")
    if reason is not None:
        raise DeviceError(f"the backend triton {reason}: choose sdpa or reference")
    from lopa.runner.backend_triton import FusedStep

    return FusedStep


def prepare(model: Transformer, step: MakeStep, room: int) -> None:
    """Weights as the step reads them fastest; some are kept twice, if there is room (bytes)."""
    made = step.func if isinstance(step, partial) else step
    if made is not Step:
        from lopa.kernels.compressed_linear import pack

        pack(model, room)


def _no_triton(config: ModelConfig, device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"needs a CUDA device, and this one is {device}"
    if find_spec("triton") is None:
        return "needs the package triton, which is not installed"
    if config.head_dim not in _HEAD_DIMS:
        return f"has no kernel for heads of {config.head_dim}"
    return None
