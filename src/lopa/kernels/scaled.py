"""Scaled tensors: fp8 or int8 values with one scale per row, or per block of a row."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
BLOCK = 128  # columns of a row that share a scale, where a row has several
SMALLEST = 1e-12  # of a row's largest value, so that a row of zeros has a scale


class Scaled(NamedTuple):
    """values · scale."""

    values: Tensor  # [T, size] fp8 or int8
    scale: Tensor  # [T, 1] fp32


class Blocked(NamedTuple):
    """values · scale of their block of columns; the last block may be shorter than BLOCK."""

    values: Tensor  # [T, size] fp8 or int8
    scale: Tensor  # [T, blocks] fp32


def quantize_rows(x: Tensor, kind: torch.dtype) -> Scaled:
    """[T, size] in plain torch; `lopa.kernels.triton.pointwise` has it as a kernel."""
    wide = x.float()
    scale = wide.abs().amax(dim=1, keepdim=True).clamp(min=SMALLEST) / LARGEST[kind]
    wide = wide * scale.reciprocal()
    return Scaled((wide.round() if kind is torch.int8 else wide).to(kind), scale)


def quantize_blocks(x: Tensor, kind: torch.dtype) -> Blocked:
    found = [quantize_rows(part, kind) for part in torch.split(x, BLOCK, dim=1)]
    values = torch.cat([one.values.view(torch.uint8) for one in found], dim=1)
    return Blocked(values.view(kind), torch.cat([one.scale for one in found], dim=1))
