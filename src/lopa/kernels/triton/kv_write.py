"""Copies of staged tokens: keys and values into the KV cache, hidden states to the head."""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

_A = TypeVar("_A")


@triton.jit
def _write_kv(
    keys,  # staged: [layers, tokens, width]
    values,
    hidden,  # [tokens, size]
    cache_k,  # [layers, cache tokens, width]
    cache_v,
    carry,  # [slots, size]
    source,  # [writes] staged token, −1: none
    slot_mapping,  # [writes] its place in the cache
    carry_source,  # [carries] staged token, −1: none
    carry_slot,  # [carries]
    carries,
    staged_stride,
    cache_stride,
    width,
    size,
    LAYERS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0)
    layer = tl.program_id(1).to(tl.int64)  # one more than there are: carries, in the same launch
    if layer < LAYERS:
        token = tl.load(source + index).to(tl.int64)
        if token >= 0:
            target = tl.load(slot_mapping + index).to(tl.int64)
            for begin in range(0, width, BLOCK):
                at = begin + tl.arange(0, BLOCK)
                inside = at < width
                here = layer * staged_stride + token * width + at
                there = layer * cache_stride + target * width + at
                tl.store(cache_k + there, tl.load(keys + here, mask=inside), mask=inside)
                tl.store(cache_v + there, tl.load(values + here, mask=inside), mask=inside)
    elif index < carries:
        token = tl.load(carry_source + index).to(tl.int64)
        if token >= 0:
            target = tl.load(carry_slot + index).to(tl.int64)
            for begin in range(0, size, BLOCK):
                at = begin + tl.arange(0, BLOCK)
                value = tl.load(hidden + token * size + at, mask=at < size)
                tl.store(carry + target * size + at, value, mask=at < size)


class Staged(NamedTuple):
    """What a forward computed and has not committed."""

    keys: Tensor  # [layers, tokens, kv_heads, d]
    values: Tensor
    hidden: Tensor  # [tokens, size]


class PendingKVWrites(NamedTuple, Generic[_A]):
    """Staged tokens that are committed and not yet in the cache; int32 on the device.

    A source of −1 is padding.
    """

    source: _A  # [writes] token
    slot_mapping: _A  # [writes] its place in the cache
    carry_source: _A  # [carries] token; there are no more carries than writes
    carry_slot: _A  # [carries] the slot whose carry it becomes


def write_kv(
    staged: Staged,
    cache_k: Tensor,
    cache_v: Tensor,
    carry: Tensor,
    writes: PendingKVWrites[Tensor],
) -> None:
    """cache_k, cache_v [layers, cache tokens, kv_heads, d]; carry [slots, size]."""
    keys, hidden = staged.keys, staged.hidden
    layers, _, kv_heads, dim = keys.shape
    width = kv_heads * dim
    _write_kv[(len(writes.source), layers + 1)](
        *staged,
        cache_k,
        cache_v,
        carry,
        *writes,
        len(writes.carry_source),
        keys.stride(0),
        cache_k.stride(0),
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
