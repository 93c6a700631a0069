"""Scaled tensors: fp8 or int8 values with one scale per row."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
SMALLEST = 1e-12  # of a row's largest value, so that a row of zeros has a scale


class Scaled(NamedTuple):
    """values · scale."""

    values: Tensor  # [T, size] fp8 or int8
    scale: Tensor  # [T, 1] fp32


def quantize_rows(x: Tensor, kind: torch.dtype) -> Scaled:
    """[T, size] in plain torch; `lopa.kernels.triton.pointwise` has it as a kernel."""
    wide = x.float()
    scale = wide.abs().amax(dim=1, keepdim=True).clamp(min=SMALLEST) / LARGEST[kind]
    wide = wide * scale.reciprocal()
    return Scaled((wide.round() if kind is torch.int8 else wide).to(kind), scale)
