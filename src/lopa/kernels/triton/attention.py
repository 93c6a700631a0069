"""Paged attention of a flat batch: every row attends to its sequence's pages and its own window.

The queries of a row and one key head, L · group of them, are folded into one axis that is split
into tiles, so any group size fills the tensor cores. A tile loops over the pages by the page table,
then over its row's window, with a running softmax. With few tiles the keys are split over several
programs, whose parts a second kernel merges by their log-sum-exp. The far part of a long prefix
can be left to cuDNN (`lopa.kernels.prefix_attention`): then it is merged there too.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from lopa.kernels import PAGE
from lopa.kernels.prefix_attention import FarPart
from lopa.kernels.triton.shared_memory import shared_memory, stages_that_fit

TILE = 64  # folded queries per program
_SMS = 132  # multiprocessors of an H200, for which the splits are tuned
_MOST_SPLITS = 4
_LOOKED_UP = 32  # pages at once


class Rows(NamedTuple):
    """The rows of a batch on the device; all int32. A tile whose row is −1 is unused."""

    tile_row: Tensor  # [tiles] its row
    tile_at: Tensor  # [tiles] its first folded query
    begin: Tensor  # [R] first token
    length: Tensor  # [R]
    start: Tensor  # [R] position of the first token
    cached: Tensor  # [R]
    slot: Tensor  # [R]
    blocks: Tensor  # [T]
    table: Tensor  # [slots, most pages a slot] pages of each slot


@triton.jit
def _dot(a, b, PRECISE: tl.constexpr):
    return tl.dot(a, b, input_precision="ieee" if PRECISE else "tf32")


@triton.jit
def _softmax_step(scores, values, scale, best, total, mixed, PRECISE: tl.constexpr):
    """One tile of keys of the running softmax: scores [TILE, PAGE], values [PAGE, D]."""
    new = tl.maximum(best, tl.max(scores, 1) * scale)
    safe = tl.where(new == -float("inf"), 0.0, new)  # nothing seen yet
    weights = tl.exp2(scores * scale - safe[:, None])
    rescale = tl.exp2(best - safe)
    total = total * rescale + tl.sum(weights, 1)
    mixed = mixed * rescale[:, None] + _dot(weights.to(values.dtype), values, PRECISE)
    return new, total, mixed


# By value, so that a kernel serves every number of splits and of pages
@triton.jit(do_not_specialize=["splits", "far_pages"])
def _attend(
    q,  # [T, heads, D], token stride given
    k,  # [T, kv_heads, D], token stride given
    v,
    cache_k,  # [S, kv_heads, D]
    cache_v,
    paged_k,  # the same [S, kv_heads · D] by descriptor, PAGE · D at a time
    paged_v,
    out,  # [T, heads, D], or if SPLIT [splits, T, heads, D] in fp32
    lse,  # [splits, T, heads] in fp32, log2
    tile_row,
    tile_at,
    row_begin,
    row_length,
    row_start,
    row_cached,
    row_slot,
    blocks,
    table,
    table_width,
    tokens,
    scale,  # of the scores, log2(e) included
    q_stride,
    k_stride,
    v_stride,
    splits,
    far_pages,  # that are left out
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    LOOKED_UP: tl.constexpr,
    PRECISE: tl.constexpr,
):
    GROUP: tl.constexpr = HEADS // KV_HEADS
    # Tiles are the slowest axis: unused ones are scheduled last and delay no other.
    head = tl.program_id(0)
    split = tl.program_id(1)
    tile = tl.program_id(2)
    row = tl.load(tile_row + tile)
    if row < 0:
        return
    begin = tl.load(row_begin + row)
    length = tl.load(row_length + row)
    start = tl.load(row_start + row)
    cached = tl.load(row_cached + row)
    pages = table + tl.load(row_slot + row) * table_width

    dims = tl.arange(0, D)
    folded = tl.load(tile_at + tile) + tl.arange(0, TILE)
    token = folded // GROUP
    query_head = head * GROUP + folded % GROUP
    live = token < length
    flat = (begin + token).to(tl.int64)
    queries = tl.load(
        q + flat[:, None] * q_stride + query_head[:, None] * D + dims[None, :],
        mask=live[:, None],
        other=0.0,
    )
    own_block = tl.load(blocks + flat, mask=live, other=0)

    best = tl.full([TILE], -float("inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    mixed = tl.zeros([TILE, D], tl.float32)

    # This split's share of the pages.
    inside_page = tl.arange(0, PAGE)
    count = tl.cdiv(cached, PAGE)
    share = tl.cdiv(count - far_pages, splits) if SPLIT else count
    first = far_pages + split * share
    last = tl.minimum(first + share, count)
    if not PRECISE:  # not in fp32, which is for checks and slow to compile
        # Whole pages before the window, without masks. Their indices are loaded outside the inner
        # loop: inside it, Triton would prefetch pages one step ahead instead of two or three.
        whole = tl.minimum(last, tl.minimum(cached, start) // PAGE)
        lane = tl.arange(0, LOOKED_UP)
        for base in tl.range(first, whole, LOOKED_UP, num_stages=1):
            looked_up = tl.load(pages + base + lane, mask=base + lane < whole, other=0)
            for at in tl.range(0, tl.minimum(whole - base, LOOKED_UP)):
                page = tl.sum(tl.where(lane == at, looked_up, 0)) * PAGE
                keys, values = paged_k.load([page, head * D]), paged_v.load([page, head * D])
                scores = _dot(queries, tl.trans(keys), PRECISE)
                best, total, mixed = _softmax_step(
                    scores, values, scale, best, total, mixed, PRECISE
                )
        first = tl.maximum(first, whole)
    # The other pages, without the window's own positions.
    offsets = inside_page[:, None] * (KV_HEADS * D) + head * D + dims[None, :]
    for index in tl.range(first, last, num_stages=1):
        page = tl.load(pages + index).to(tl.int64) * (PAGE * KV_HEADS * D)
        position = index * PAGE + inside_page
        there = position < cached
        keys = tl.load(cache_k + page + offsets, mask=there[:, None], other=0.0)
        values = tl.load(cache_v + page + offsets, mask=there[:, None], other=0.0)
        seen = there & ((position < start) | (position >= start + length))
        scores = _dot(queries, tl.trans(keys), PRECISE)
        scores = tl.where(live[:, None] & seen[None, :], scores, -float("inf"))
        best, total, mixed = _softmax_step(scores, values, scale, best, total, mixed, PRECISE)
    # The window, in the last split.
    window = tl.where(split == splits - 1, length, 0) if SPLIT else length
    for at in tl.range(0, window, PAGE, num_stages=1):
        column = at + inside_page
        there = column < length
        where = (begin + column).to(tl.int64)
        keys = tl.load(
            k + where[:, None] * k_stride + head * D + dims[None, :], mask=there[:, None], other=0.0
        )
        values = tl.load(
            v + where[:, None] * v_stride + head * D + dims[None, :], mask=there[:, None], other=0.0
        )
        block = tl.load(blocks + where, mask=there, other=0)
        seen = there[None, :] & live[:, None] & (block[None, :] <= own_block[:, None])
        scores = tl.where(seen, _dot(queries, tl.trans(keys), PRECISE), -float("inf"))
        best, total, mixed = _softmax_step(scores, values, scale, best, total, mixed, PRECISE)

    result = mixed / tl.where(total > 0, total, 1.0)[:, None]
    place = (split.to(tl.int64) * tokens + flat) * HEADS + query_head
    tl.store(
        out + place[:, None] * D + dims[None, :],
        result.to(out.dtype.element_ty),
        mask=live[:, None],
    )
    if SPLIT:
        level = tl.where(total > 0, best + tl.log2(tl.where(total > 0, total, 1.0)), -float("inf"))
        tl.store(lse + place, level, mask=live)


@triton.jit(do_not_specialize=["splits", "chunks"])
def _merge(
    parts,  # [splits, count, D] in fp32; count = T · heads
    lse,  # [splits, count] in fp32, log2
    far,  # [chunks, count, D]
    far_lse,  # [chunks, heads, T] in fp32, natural
    out,  # [count, D]
    count,
    splits,
    chunks,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
    FAR: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = row < count
    dims = tl.arange(0, D)
    best = tl.full([ROWS], -float("inf"), tl.float32)
    for split in tl.static_range(MOST_SPLITS):
        there = live & (tl.full([ROWS], split, tl.int32) < splits)
        level = tl.load(lse + split * count + row, mask=there, other=-float("inf"))
        best = tl.maximum(best, level)
    best = tl.where(live, best, 0.0)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, D], tl.float32)
    for split in tl.static_range(MOST_SPLITS):
        there = live & (tl.full([ROWS], split, tl.int32) < splits)
        level = tl.load(lse + split * count + row, mask=there, other=-float("inf"))
        weight = tl.exp2(level - best)
        part = tl.load(
            parts + (split * count + row).to(tl.int64)[:, None] * D + dims[None, :],
            mask=there[:, None],
            other=0.0,
        )
        total += weight
        mixed += part * weight[:, None]
    if FAR:
        far_level = far_lse + row % HEADS * (count // HEADS) + row // HEADS
        far_part = far + row.to(tl.int64)[:, None] * D + dims[None, :]
        for _ in tl.range(0, chunks):
            level = tl.load(far_level, mask=live, other=0.0) * 1.4426950408889634
            part = tl.load(far_part, mask=live[:, None], other=0.0).to(tl.float32)
            new = tl.maximum(best, level)
            rescale, weight = tl.exp2(best - new), tl.exp2(level - new)
            total = total * rescale + weight
            mixed = mixed * rescale[:, None] + part * weight[:, None]
            best = new
            far_level += count
            far_part += count * D
    mixed = mixed / tl.where(live, total, 1.0)[:, None]
    tl.store(
        out + row.to(tl.int64)[:, None] * D + dims[None, :],
        mixed.to(out.dtype.element_ty),
        mask=live[:, None],
    )


def attend(
    q: Tensor,  # [T, heads, D]
    k: Tensor,  # [T, kv_heads, D]
    v: Tensor,
    cache_k: Tensor,  # [S, kv_heads, D], contiguous
    cache_v: Tensor,
    rows: Rows,
    *,
    splits: int | None = None,
    far: FarPart | None = None,
) -> Tensor:
    """[T, heads, D]. Tokens that no tile covers (padding) are left unwritten, or hold anything.

    splits: of the keys; by default as many as fill the device. far: what all rows see of the first
    pages, which are left out here.
    """
    tokens, heads, dim = q.shape
    kv_heads = k.shape[1]
    programs = max(1, tokens * heads // TILE)
    splits = splits or max(1, min(_MOST_SPLITS, _SMS // programs))
    stages = stages_for(programs * splits, dim * q.element_size(), shared_memory(q.device))
    if q.stride()[1:] != (dim, 1) or k.stride()[1:] != (dim, 1) or v.stride()[1:] != (dim, 1):
        raise ValueError("the heads of a token must lie side by side")
    out = torch.empty(tokens, heads, dim, dtype=q.dtype, device=q.device)
    parts, lse, is_precise = out, out, q.dtype is torch.float32
    is_split = splits > 1 or far is not None
    if is_split:
        parts = torch.empty(splits, tokens, heads, dim, dtype=torch.float32, device=q.device)
        lse = torch.empty(splits, tokens, heads, dtype=torch.float32, device=q.device)
    paged = [
        TensorDescriptor.from_tensor(cache.view(len(cache), -1), [PAGE, dim])
        for cache in (cache_k, cache_v)
    ]
    _attend[(kv_heads, splits, len(rows.tile_row))](
        q,
        k,
        v,
        cache_k,
        cache_v,
        *paged,
        parts,
        lse,
        *rows[:7],
        rows.blocks,
        rows.table,
        rows.table.shape[1],
        tokens,
        dim**-0.5 * 1.4426950408889634,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        splits,
        0 if far is None else far.pages,
        HEADS=heads,
        KV_HEADS=kv_heads,
        D=dim,
        PAGE=PAGE,
        TILE=TILE,
        SPLIT=is_split,
        LOOKED_UP=_LOOKED_UP,
        PRECISE=is_precise,
        # In fp32 the products are unrolled: fewer warps spill registers and take long to compile.
        num_warps=16 if is_precise else 4,
        num_stages=1 if is_precise else stages,
    )
    if is_split:
        count = tokens * heads
        _merge[(triton.cdiv(count, 8),)](
            parts,
            lse,
            *(parts, lse) if far is None else far,
            out,
            count,
            splits,
            0 if far is None else len(far.mixed),
            HEADS=heads,
            D=dim,
            MOST_SPLITS=max(splits, _MOST_SPLITS),
            FAR=far is not None,
            ROWS=8,
        )
    return out


def stages_for(programs: int, head_bytes: int, shared: int) -> int:
    """Pages in flight at once; with more of them a second program does not fit an SM."""
    wanted = 4 if programs <= _SMS else 3
    return stages_that_fit(wanted, 2 * PAGE * head_bytes, shared - TILE * head_bytes)


def most_tiles(tokens: int, rows: int, group: int) -> int:
    """The most tiles that a batch of so many tokens and rows can need.

    Whole 16 bytes of them, so that what lies behind them in a buffer is aligned: Triton compiles
    another kernel for pointers that are not.
    """
    return triton.cdiv(triton.cdiv(tokens * group, TILE) + rows, 4) * 4
