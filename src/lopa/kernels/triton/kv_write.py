"""Moves between what a forward left and what is kept: staged tokens to pages, rows to the head."""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

_A = TypeVar("_A")


@triton.jit
def _settle(
    keys,  # staged: [layers, tokens, width]
    values,
    hidden,  # [tokens, size]
    pool_k,  # [layers, places, width]
    pool_v,
    carry,  # [slots, size]
    source,  # [moves] staged token, −1: none
    place,  # [moves] in the pool
    carried,  # [carries] staged token, −1: none
    slot,  # [carries]
    carries,
    staged_stride,
    pool_stride,
    width,
    size,
    LAYERS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    move = tl.program_id(0)
    layer = tl.program_id(1).to(tl.int64)
    if layer < LAYERS:
        token = tl.load(source + move).to(tl.int64)
        if token >= 0:
            target = tl.load(place + move).to(tl.int64)
            for begin in range(0, width, BLOCK):
                at = begin + tl.arange(0, BLOCK)
                inside = at < width
                here = layer * staged_stride + token * width + at
                there = layer * pool_stride + target * width + at
                tl.store(pool_k + there, tl.load(keys + here, mask=inside), mask=inside)
                tl.store(pool_v + there, tl.load(values + here, mask=inside), mask=inside)
    elif move < carries:
        token = tl.load(carried + move).to(tl.int64)
        if token >= 0:
            target = tl.load(slot + move).to(tl.int64)
            for begin in range(0, size, BLOCK):
                at = begin + tl.arange(0, BLOCK)
                value = tl.load(hidden + token * size + at, mask=at < size)
                tl.store(carry + target * size + at, value, mask=at < size)


class Staged(NamedTuple):
    """What a forward left."""

    keys: Tensor  # [layers, tokens, kv_heads, d]
    values: Tensor
    hidden: Tensor  # [tokens, size]


class Moves(NamedTuple, Generic[_A]):
    """Which staged tokens go where; int32 on the device. Those of token −1 do not."""

    source: _A  # [moves] token
    place: _A  # [moves] in the pool
    carried: _A  # [carries] token, of no more than there are moves
    slot: _A  # [carries] whose carry it becomes


def settle(
    staged: Staged, pool_k: Tensor, pool_v: Tensor, carry: Tensor, moves: Moves[Tensor]
) -> None:
    """pool_k, pool_v [layers, places, kv_heads, d]; carry [slots, size]."""
    keys, hidden = staged.keys, staged.hidden
    layers, _, kv_heads, dim = keys.shape
    width = kv_heads * dim
    _settle[(len(moves.source), layers + 1)](
        *staged,
        pool_k,
        pool_v,
        carry,
        *moves,
        len(moves.carried),
        keys.stride(0),
        pool_k.stride(0),
        width,
        hidden.shape[1],
        LAYERS=layers,
        BLOCK=min(1024, triton.next_power_of_2(width)),
    )


@triton.jit
def _gather(hidden, carry, source, out, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    where = tl.load(source + row).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    if where < 0:
        value = tl.load(carry + (-1 - where) * size + at, mask=inside, other=0.0)
    else:
        value = tl.load(hidden + where * size + at, mask=inside, other=0.0)
    tl.store(out + row * size + at, value, mask=inside)


def gather(hidden: Tensor, carry: Tensor, source: Tensor) -> Tensor:
    """[N, size]: row `source` of hidden, or where it is negative row −1 − source of carry."""
    size = hidden.shape[1]
    out = torch.empty(len(source), size, dtype=hidden.dtype, device=hidden.device)
    block = min(1024, triton.next_power_of_2(size))
    _gather[(len(source), triton.cdiv(size, block))](hidden, carry, source, out, size, BLOCK=block)
    return out
