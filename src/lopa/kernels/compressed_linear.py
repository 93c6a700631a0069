"""Linear layers whose weights are kept twice: in bf16, and packed for rounds of few tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lopa.kernels.hopper.compressed_gemm import Packed, packed, packed_bytes, planned
from lopa.kernels.quantize import PARTS, QuantizedLinear
from lopa.models.transformer import Linear, Transformer

_SHARE = 0.25  # of the room, at most


class PackedLinear(Linear):
    """Whoever has few tokens takes `packed`, which for gate and up is their activated product."""

    def __init__(self, linear: Linear, made: Packed) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = linear.weight.shape
        self.weight, self.bias = linear.weight, linear.bias
        self.packed = made


def pack(model: Transformer, room: int) -> None:
    """Replace the linear layers that are read faster so, if a part of `room` holds all of them."""
    owners = [(getattr(layer, part), name) for layer in model.layers for part, name in PARTS]
    if not model.config.tied_head:
        owners.append((model, "head"))
    chosen = [
        (owner, name, linear)
        for owner, name in owners
        if _can_be(linear := getattr(owner, name), name)
    ]
    size = sum(packed_bytes(linear.weight) for *_, linear in chosen)
    if not chosen or size > _SHARE * room:
        return
    for owner, name, linear in chosen:
        if (made := packed(linear.weight, gated=_is_gated(name))) is not None:
            setattr(owner, name, PackedLinear(linear, made))
    torch.cuda.empty_cache()  # what it took on the way: the cache is made of what is free


def _can_be(linear: Any, name: str) -> bool:
    if isinstance(linear, QuantizedLinear) or linear.bias is not None:
        return False
    return planned(linear.weight, gated=_is_gated(name)) is not None


def _is_gated(name: str) -> bool:
    return name == "gate_up"
