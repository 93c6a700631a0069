"""Products of scaled tensors: x · wᵀ with one scale per row of x and of w, in fp8 or int8.

All of int8; of fp8 the shapes that torch's own product is slow at (`lopa.kernels.quantize`). Where
the result has fewer tiles than the device has multiprocessors, the inner axis is split over several
programs (split-K). The last program to finish a tile adds up the parts, always in the same order.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lopa.kernels.triton.shared_memory import shared_memory, stages_that_fit

_LEAST_SHARE = 4096  # of the inner axis, for a program to be worth its parts
_MOST_TILES = 1024  # that are split


class Tiling(NamedTuple):
    rows: int
    columns: int
    inner: int
    warps: int
    stages: int
    programs: int = 132  # that fill the device


@triton.jit
def _scaled(
    x,  # [M, K]
    w,  # [N, K]
    x_scale,  # [M]
    w_scale,  # [N]
    bias,  # [N]
    out,  # [M, N]
    parts,  # [tiles, splits, BLOCK_M, BLOCK_N] fp32 or int32
    arrived,  # [tiles] int32: programs of a tile that are done; zero before and after
    M,
    N,
    K,
    share,  # of the inner axis for each split: whole blocks
    splits,
    HAS_BIAS: tl.constexpr,
    WHOLE: tl.constexpr,  # int8: sums are int32
    SPLIT: tl.constexpr,
    EVEN: tl.constexpr,  # the inner axis is whole blocks
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    # Programs that share columns of w follow one another, so that w is read from memory once.
    tile = tl.program_id(0)
    split = tl.program_id(1)
    rows, columns = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    per_group = GROUP * columns
    top = tile // per_group * GROUP
    height = tl.minimum(rows - top, GROUP)
    m = (top + tile % per_group % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = (tile % per_group // height) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_at = x + (m % M).to(tl.int64)[:, None] * K + k[None, :]
    w_at = w + (n % N).to(tl.int64)[:, None] * K + k[None, :]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.int32 if WHOLE else tl.float32)
    first = split * share
    for at in range(first, tl.minimum(first + share, K), BLOCK_K):
        if EVEN:
            a = tl.load(x_at + at)
            b = tl.load(w_at + at)
        else:
            inside = (at + k < K)[None, :]
            a = tl.load(x_at + at, mask=inside, other=0.0)
            b = tl.load(w_at + at, mask=inside, other=0.0)
        if WHOLE:
            total = tl.dot(a, tl.trans(b), total, out_dtype=tl.int32)
        else:
            total = tl.dot(a, tl.trans(b), total)
    last = True
    if SPLIT:
        inside_tile = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        place = parts + tile.to(tl.int64) * splits * (BLOCK_M * BLOCK_N) + inside_tile
        tl.store(place + split * (BLOCK_M * BLOCK_N), total)
        tl.debug_barrier()  # all of it is written before it is counted
        last = tl.atomic_add(arrived + tile, 1, sem="acq_rel") == splits - 1
        if last:
            total = tl.zeros([BLOCK_M, BLOCK_N], tl.int32 if WHOLE else tl.float32)
            for one in range(splits):
                total += tl.load(place + one * (BLOCK_M * BLOCK_N), cache_modifier=".cg")
            tl.store(arrived + tile, 0)
    if last:
        result = total.to(tl.float32)
        result = result * tl.load(x_scale + m % M)[:, None] * tl.load(w_scale + n % N)[None, :]
        if HAS_BIAS:
            result += tl.load(bias + n % N)[None, :].to(tl.float32)
        tl.store(
            out + m.to(tl.int64)[:, None] * N + n[None, :],
            result.to(out.dtype.element_ty),
            mask=(m < M)[:, None] & (n < N)[None, :],
        )


def tiling(rows: int, columns: int) -> Tiling:
    """The fastest of those tried on an H200 (measurements/kernels.md)."""
    if rows <= 64:
        return Tiling(64, 64, 256 if columns < 64 * 264 else 128, warps=4, stages=4)
    if rows <= 256:
        return Tiling(64, 128, 128, warps=4, stages=4, programs=264)
    return Tiling(128, 128, 128, warps=8, stages=4)


def fitted(tile: Tiling, shared: int) -> Tiling:
    """With as many stages as fit the shared memory; values are one byte each."""
    stage = (tile.rows + tile.columns) * tile.inner
    return tile._replace(stages=stages_that_fit(tile.stages, stage, shared))


def splits_for(rows: int, columns: int, inner: int, tile: Tiling) -> int:
    """As many as fill the device, as long as each has enough of the inner axis."""
    tiles = triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns)
    return max(1, min(tile.programs // tiles, inner // _LEAST_SHARE))


def scaled_matmul(
    x: Tensor,  # [M, K]
    x_scale: Tensor,  # [M, 1]
    w: Tensor,  # [N, K]
    w_scale: Tensor,  # [N, 1]
    bias: Tensor | None,
    dtype: torch.dtype,
    *,
    tile: Tiling | None = None,
    splits: int | None = None,
) -> Tensor:
    (rows, inner), columns = x.shape, w.shape[0]
    tile = fitted(tile or tiling(rows, columns), shared_memory(x.device))
    splits = splits or splits_for(rows, columns, inner, tile)
    share = triton.cdiv(triton.cdiv(inner, tile.inner), splits) * tile.inner
    splits = triton.cdiv(inner, share)  # no split is empty
    tiles = triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns)
    out = torch.empty(rows, columns, dtype=dtype, device=x.device)
    whole = x.dtype == torch.int8
    parts = arrived = out
    if splits > 1:
        shape = (tiles, splits, tile.rows, tile.columns)
        parts = out.new_empty(shape, dtype=torch.int32 if whole else torch.float32)
        if tiles > _MOST_TILES:
            raise ValueError(f"{tiles} tiles are too many to be split")
        arrived = _counters(x.device)
    _scaled[(tiles, splits)](
        x,
        w,
        x_scale,
        w_scale,
        w_scale if bias is None else bias,
        out,
        parts,
        arrived,
        rows,
        columns,
        inner,
        share,
        splits,
        HAS_BIAS=bias is not None,
        WHOLE=whole,
        SPLIT=splits > 1,
        EVEN=inner % tile.inner == 0,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.columns,
        BLOCK_K=tile.inner,
        GROUP=8,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out


@cache
def _counters(device: torch.device) -> Tensor:
    """All zero before and after a kernel. Never freed: graphs hold the address."""
    return torch.zeros(_MOST_TILES, dtype=torch.int32, device=device)
