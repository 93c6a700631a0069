"""The products of experts: each tile of tokens with the weights of its own expert.

Few tokens go to each of many experts, so the time is that of reading the experts that are touched.
A program has a tile and some columns. It reads their weights once, several steps ahead, and the
tokens of the tile beside them. The weights are the first operand of the tensor cores, which takes
rows by 64, and the tokens the second, which may be as few as 16. The programs of unused tiles leave
at once, so the grid is that of the worst case and the host need not know the sizes.

A sum is over the whole inner axis in the order of the axis, so the result for a token depends
neither on the tile it is in nor on how large tiles are, to the bit (`measurements/experts.py
checks`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lopa.kernels.scaled import BLOCK, LARGEST, Blocked, Scaled
from lopa.kernels.triton.pointwise import _to_type
from lopa.kernels.triton.routing import Tiles
from lopa.kernels.triton.shared_memory import shared_memory, stages_that_fit


class Tiling(NamedTuple):
    columns: int  # of the weight, per program
    inner: int
    warps: int
    stages: int


@triton.jit
def _weights(
    w,  # [rows, inner]
    row,  # first
    at,  # of the inner axis
    rows,
    inner,
    EVEN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """[BLOCK_N, BLOCK_K]; rows that are not the expert's are some others."""
    n = tl.minimum(row + tl.arange(0, BLOCK_N), rows - 1).to(tl.int64)
    k = at + tl.arange(0, BLOCK_K)
    place = w + n[:, None] * inner + k[None, :]
    if EVEN:
        found = tl.load(place)
    else:
        found = tl.load(place, mask=(k < inner)[None, :], other=0.0)
    return found


@triton.jit
def _tokens(place, at, inner, EVEN: tl.constexpr, BLOCK_K: tl.constexpr):
    """[BLOCK_M, BLOCK_K]"""
    if EVEN:
        found = tl.load(place + at)
    else:
        k = at + tl.arange(0, BLOCK_K)
        found = tl.load(place + at, mask=(k < inner)[None, :], other=0.0)
    return found


@triton.jit
def _product(w, x, total, WHOLE: tl.constexpr, WIDE: tl.constexpr):
    """total + w · xᵀ, [BLOCK_N, BLOCK_M]"""
    if WIDE:  # fp32; and bf16 in the interpreter, which has no product of it
        w, x = w.to(tl.float32), x.to(tl.float32)
        total = tl.dot(w, tl.trans(x), total, input_precision="ieee")
    elif WHOLE:
        total = tl.dot(w, tl.trans(x), total, out_dtype=tl.int32)
    else:
        total = tl.dot(w, tl.trans(x), total)
    return total


@triton.jit
def _gate_up(
    x,  # [T, inner]
    x_scale,  # [T] when quantized
    w,  # [experts · 2 · size, inner]: of each expert gate, then up
    w_scale,  # [experts · 2 · size] when quantized
    order,
    tile_expert,
    tile_begin,
    tile_end,
    out,  # [pairs, size], in the order of `order`
    out_scale,  # [pairs, blocks] when quantized
    size,
    inner,
    rows,
    CHOICES: tl.constexpr,
    LARGEST: tl.constexpr,  # 0: not quantized
    WIDE: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tile = tl.program_id(1)
    expert = tl.load(tile_expert + tile)
    if expert < 0:
        return
    WHOLE: tl.constexpr = LARGEST == 127.0
    kind: tl.constexpr = tl.int32 if WHOLE else tl.float32
    end = tl.load(tile_end + tile)
    place = tl.load(tile_begin + tile) + tl.arange(0, BLOCK_M)
    # Past the end the last pair again: it is not stored.
    token = tl.load(order + tl.minimum(place, end - 1)) // CHOICES
    column = tl.program_id(0) * BLOCK_N
    gate_row = expert * (2 * size) + column
    up_row = gate_row + size
    x_at = x + token.to(tl.int64)[:, None] * inner + tl.arange(0, BLOCK_K)[None, :]
    gate = tl.zeros([BLOCK_N, BLOCK_M], kind)
    up = tl.zeros([BLOCK_N, BLOCK_M], kind)
    for at in range(0, inner, BLOCK_K):
        b = _tokens(x_at, at, inner, EVEN, BLOCK_K)
        a = _weights(w, gate_row, at, rows, inner, EVEN, BLOCK_N, BLOCK_K)
        gate = _product(a, b, gate, WHOLE, WIDE)
        a = _weights(w, up_row, at, rows, inner, EVEN, BLOCK_N, BLOCK_K)
        up = _product(a, b, up, WHOLE, WIDE)
    n = column + tl.arange(0, BLOCK_N)
    inside = n < size
    gate, up = gate.to(tl.float32), up.to(tl.float32)
    if LARGEST > 0:
        own = tl.load(x_scale + token)[None, :]
        at_gate = w_scale + expert * (2 * size) + n
        gate = gate * tl.load(at_gate, mask=inside, other=0.0)[:, None] * own
        up = up * tl.load(at_gate + size, mask=inside, other=0.0)[:, None] * own
    active = gate / (1.0 + tl.exp(-gate)) * up
    live = place < end
    if LARGEST > 0:
        peak = tl.max(tl.where(inside[:, None], tl.abs(active), 0.0), 0)
        step = tl.maximum(peak, 1e-12) / LARGEST
        blocks = tl.cdiv(size, BLOCK_N)
        tl.store(out_scale + place * blocks + tl.program_id(0), step, mask=live)
        active = _to_type(active, step[None, :], LARGEST, out.dtype.element_ty)
    tl.store(
        out + place.to(tl.int64)[:, None] * size + n[None, :],
        tl.trans(active.to(out.dtype.element_ty)),
        mask=live[:, None] & inside[None, :],
    )


@triton.jit
def _down(
    x,  # [pairs, inner], in the order of `order`
    x_scale,  # [pairs, blocks] when quantized: BLOCK_K is such a block
    w,  # [experts · size, inner]
    w_scale,  # [experts · size] when quantized
    order,
    tile_expert,
    tile_begin,
    tile_end,
    out,  # [pairs, size], by pair
    size,
    inner,
    rows,
    LARGEST: tl.constexpr,
    WIDE: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tile = tl.program_id(1)
    expert = tl.load(tile_expert + tile)
    if expert < 0:
        return
    WHOLE: tl.constexpr = LARGEST == 127.0
    end = tl.load(tile_end + tile)
    place = tl.load(tile_begin + tile) + tl.arange(0, BLOCK_M)
    known = tl.minimum(place, end - 1)
    column = tl.program_id(0) * BLOCK_N
    row = expert * size + column
    x_at = x + known.to(tl.int64)[:, None] * inner + tl.arange(0, BLOCK_K)[None, :]
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for at in range(0, inner, BLOCK_K):
        b = _tokens(x_at, at, inner, EVEN, BLOCK_K)
        a = _weights(w, row, at, rows, inner, EVEN, BLOCK_N, BLOCK_K)
        if LARGEST > 0:
            blocks = tl.cdiv(inner, BLOCK_K)
            step = tl.load(x_scale + known * blocks + at // BLOCK_K)
            zeros = tl.zeros([BLOCK_N, BLOCK_M], tl.int32 if WHOLE else tl.float32)
            total += _product(a, b, zeros, WHOLE, WIDE).to(tl.float32) * step[None, :]
        else:
            total = _product(a, b, total, WHOLE, WIDE)
    n = column + tl.arange(0, BLOCK_N)
    if LARGEST > 0:
        total *= tl.load(w_scale + expert * size + n, mask=n < size, other=0.0)[:, None]
    pair = tl.load(order + known).to(tl.int64)
    tl.store(
        out + pair[:, None] * size + n[None, :],
        tl.trans(total.to(out.dtype.element_ty)),
        mask=(place < end)[:, None] & (n < size)[None, :],
    )


def gate_up(
    x: Tensor | Scaled,  # [T, hidden]
    w: Tensor,  # [experts, 2 · inner, hidden]
    w_scale: Tensor | None,  # [experts, 2 · inner, 1]
    tiles: Tiles,
    choices: int,
    *,
    tiling: Tiling | None = None,
) -> Tensor | Blocked:
    """silu(x · gateᵀ) · (x · upᵀ), [pairs, inner] in the order of the tiles."""
    values, scale = x if isinstance(x, Scaled) else (x, x)
    experts, double, hidden = w.shape
    size, pairs = double // 2, len(tiles.order)
    tiling = tiling or gate_up_tiling(tiles.size, w.dtype)
    out = torch.empty(pairs, size, dtype=w.dtype, device=w.device)
    columns = triton.cdiv(size, tiling.columns)
    out_scale = out
    if w_scale is not None:
        if tiling.columns != BLOCK:
            raise ValueError(f"quantized columns go by {BLOCK}, not by {tiling.columns}")
        out_scale = torch.empty(pairs, columns, dtype=torch.float32, device=w.device)
    flat = w.view(experts * double, hidden)
    _gate_up[(columns, len(tiles.expert))](
        values,
        scale,
        flat,
        w if w_scale is None else w_scale,
        *tiles[:4],
        out,
        out_scale,
        size,
        hidden,
        len(flat),
        CHOICES=choices,
        **_sizes(tiles, w, hidden, tiling, 2 * tiling.columns),
    )
    return out if w_scale is None else Blocked(out, out_scale)


def down(
    x: Tensor | Blocked,  # [pairs, inner] in the order of the tiles
    w: Tensor,  # [experts, hidden, inner]
    w_scale: Tensor | None,  # [experts, hidden, 1]
    tiles: Tiles,
    out: Tensor,  # [pairs, hidden]
    *,
    tiling: Tiling | None = None,
) -> None:
    """x · downᵀ, to the places of the pairs. Those that go nowhere are left unwritten."""
    values, scale = x if isinstance(x, Blocked) else (x, x)
    experts, hidden, inner = w.shape
    tiling = tiling or down_tiling(tiles.size, w.dtype)
    if w_scale is not None and tiling.inner != BLOCK:
        raise ValueError(f"quantized inner columns go by {BLOCK}, not by {tiling.inner}")
    flat = w.view(experts * hidden, inner)
    _down[(triton.cdiv(hidden, tiling.columns), len(tiles.expert))](
        values,
        scale,
        flat,
        w if w_scale is None else w_scale,
        *tiles[:4],
        out,
        hidden,
        inner,
        len(flat),
        **_sizes(tiles, w, inner, tiling, tiling.columns),
    )


def gate_up_tiling(tile: int, kind: torch.dtype) -> Tiling:
    """The fastest on an H200 (`measurements/experts.py tiles`); tile: tokens."""
    if kind.itemsize == 1:
        if tile <= 32:
            return Tiling(BLOCK, 128, warps=4, stages=3)
        return Tiling(BLOCK, 64 if tile <= 64 else 128, warps=4 if tile <= 64 else 8, stages=4)
    if tile <= 32:
        return Tiling(64, 128 if tile <= 16 else 64, warps=4, stages=3)
    return Tiling(128, 64, warps=8, stages=4 if tile <= 64 else 3)


def down_tiling(tile: int, kind: torch.dtype) -> Tiling:
    if kind.itemsize == 1:
        if tile == 32:
            return Tiling(256, BLOCK, warps=8, stages=3)
        return Tiling(128, BLOCK, warps=4 if tile <= 64 else 8, stages=3 if tile <= 16 else 4)
    return Tiling(128, 64, warps=4 if tile <= 64 else 8, stages=3 if tile <= 64 else 4)


def _sizes(tiles: Tiles, w: Tensor, inner: int, tiling: Tiling, rows: int) -> dict[str, object]:
    """rows: of the weight, in a stage."""
    stage = (rows + tiles.size) * tiling.inner * w.element_size()
    is_wide = w.dtype is torch.float32 or (w.dtype is torch.bfloat16 and not w.is_cuda)
    return {
        "LARGEST": LARGEST.get(w.dtype, 0.0),
        "WIDE": is_wide,
        "EVEN": inner % tiling.inner == 0,
        "BLOCK_M": tiles.size,
        "BLOCK_N": tiling.columns,
        "BLOCK_K": tiling.inner,
        "num_warps": tiling.warps,
        "num_stages": stages_that_fit(tiling.stages, stage, shared_memory(w.device)),
    }
