"""Moves between what a forward left and what is kept: staged tokens to pages, rows to the head."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _settle(
    keys,  # staged: [layers, tokens, width]
    values,
    pool_k,  # [layers, places, width]
    pool_v,
    moves,  # [2, count]: staged token, place in the pool
    count,
    staged_stride,
    pool_stride,
    width,
    BLOCK: tl.constexpr,
):
    move = tl.program_id(0)
    layer = tl.program_id(1).to(tl.int64)
    source = tl.load(moves + move).to(tl.int64)
    target = tl.load(moves + count + move).to(tl.int64)
    for begin in range(0, width, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        inside = at < width
        here = layer * staged_stride + source * width + at
        there = layer * pool_stride + target * width + at
        tl.store(pool_k + there, tl.load(keys + here, mask=inside), mask=inside)
        tl.store(pool_v + there, tl.load(values + here, mask=inside), mask=inside)


def settle(keys: Tensor, values: Tensor, pool_k: Tensor, pool_v: Tensor, moves: Tensor) -> None:
    """keys, values [layers, tokens, kv_heads, d] → pool [layers, places, kv_heads, d]."""
    width = keys.shape[2] * keys.shape[3]
    _settle[(moves.shape[1], keys.shape[0])](
        keys,
        values,
        pool_k,
        pool_v,
        moves,
        moves.shape[1],
        keys.stride(0),
        pool_k.stride(0),
        width,
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
