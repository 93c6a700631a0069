"""Which experts a token goes to, and its tokens to each expert, without asking the host.

Three kernels. The router's product in fp32, its inner axis in shares of fixed length, so that a
token's scores do not depend on the other tokens. The choice: one program a token. The grouping: one
program an expert, which finds its place among the others by counting and lists its tokens in their
order, so there are no atomics and nothing depends on which program runs first.

A token's experts are those of `lopa.models.mixture.Router`, where the fp32 scores of the two agree:
sums are added in another order, so scores that differ in the last bits may be ranked otherwise. Of
equal scores the lower expert is chosen, here as there.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lopa.models.config import MixtureConfig

_SHARE = 256  # of the inner axis, summed by itself
_MOST_APART = 4096  # tokens whose shares go to programs of their own
_ROWS = 1  # tokens whose experts a program chooses: its one warp need not wait for others
_PAIRS = 1024  # looked at in one step
_TINY = tl.constexpr(1e-20)  # as in the plain router


@triton.jit
def _levels(
    x,  # [T, inner]
    w,  # [experts, inner]
    out,  # [shares, T, experts] fp32, or with TOGETHER [1, T, experts]
    tokens,
    experts,
    inner,
    TOGETHER: tl.constexpr,  # one program adds up all shares
    PRECISION: tl.constexpr,
    SHARE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    e = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    share = tl.program_id(2)
    k = tl.arange(0, BLOCK_K)
    x_at = x + (t % tokens).to(tl.int64)[:, None] * inner + k[None, :]
    w_at = w + (e % experts)[:, None] * inner + k[None, :]
    total = tl.zeros([BLOCK_E, BLOCK_T], tl.float32)
    first = 0 if TOGETHER else share * SHARE
    last = inner if TOGETHER else tl.minimum(first + SHARE, inner)
    for begin in range(first, last, SHARE):
        part = tl.zeros([BLOCK_E, BLOCK_T], tl.float32)
        for step in tl.static_range(0, SHARE, BLOCK_K):
            inside = (begin + step + k < inner)[None, :]
            a = tl.load(w_at + begin + step, mask=inside, other=0.0).to(tl.float32)
            b = tl.load(x_at + begin + step, mask=inside, other=0.0).to(tl.float32)
            part = tl.dot(a, tl.trans(b), part, input_precision=PRECISION)
        total += part
    place = (share.to(tl.int64) * tokens + t) * experts
    tl.store(
        out + place[None, :] + e[:, None],
        total,
        mask=(e < experts)[:, None] & (t < tokens)[None, :],
    )


@triton.jit
def _first_best(scores, free, lane, LANES: tl.constexpr):
    """[ROWS, 1]: of each row the lowest free lane that has the largest score of those free."""
    best = tl.max(tl.where(free, scores, -float("inf")), 1)[:, None]
    return tl.min(tl.where(free & (scores == best), lane, LANES), 1)[:, None]


@triton.jit
def _choose(
    levels,  # [shares, T, experts]
    bias,  # [experts]
    used,  # [1] tokens that are not padding
    chosen,  # [T, CHOICES]
    weights,  # [T, CHOICES]
    tokens,
    scale,
    nowhere,  # the expert of padding
    SHARES: tl.constexpr,
    EXPERTS: tl.constexpr,
    LANES: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    CHOICES: tl.constexpr,  # one more where there is a shared expert
    COLUMNS: tl.constexpr,
    SIGMOID: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    RENORMALISE: tl.constexpr,
    ROWS: tl.constexpr,  # tokens of a program
):
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    live = token < tl.load(used)
    lane = tl.arange(0, LANES)[None, :]
    column = tl.arange(0, COLUMNS)[None, :]
    there = live & (lane < EXPERTS)
    level = tl.zeros([ROWS, LANES], tl.float32)
    for share in tl.static_range(SHARES):
        at = (share * tokens + token).to(tl.int64) * EXPERTS + lane
        level += tl.load(levels + at, mask=there, other=0.0)
    if SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-level))
    else:
        level = tl.where(lane < EXPERTS, level, -float("inf"))
        score = tl.exp(level - tl.max(level, 1)[:, None])
        score = score / tl.sum(score, 1)[:, None]
    ranked = score
    if HAS_BIAS:
        ranked += tl.load(bias + lane, mask=lane < EXPERTS, other=0.0)
    ranked = tl.where(ranked == ranked, ranked, -float("inf"))  # NaN is never the best
    free = (token >= 0) & (lane < EXPERTS)
    if GROUPS > 1:
        size: tl.constexpr = EXPERTS // GROUPS
        group = lane // size
        sums = tl.zeros([ROWS, LANES], tl.float32)  # of each lane's group: its two best
        for one in range(GROUPS):
            inside = free & (group == one)
            best = _first_best(ranked, inside, lane, LANES)
            second = tl.max(tl.where(inside & (lane != best), ranked, -float("inf")), 1)
            first = tl.max(tl.where(inside, ranked, -float("inf")), 1)
            sums = tl.where(inside, (first + second)[:, None], sums)
        dropped = free
        for _ in range(TOP_GROUPS):
            best = _first_best(sums, dropped, lane, LANES)
            dropped = dropped & (group != best // size)
        free = free & ~dropped
    expert = tl.full([ROWS, COLUMNS], EXPERTS, tl.int32)  # the shared one is behind the others
    weight = tl.zeros([ROWS, COLUMNS], tl.float32)
    for index in range(PER_TOKEN):
        best = _first_best(ranked, free, lane, LANES)
        free = free & (lane != best)
        own = tl.sum(tl.where(lane == best, score, 0.0), 1)[:, None]
        expert = tl.where(column == index, best, expert)
        weight = tl.where(column == index, own, weight)
    if RENORMALISE:
        weight = weight / (tl.sum(weight, 1)[:, None] + _TINY)
    weight = tl.where(column < PER_TOKEN, weight * scale, 1.0)
    place = token.to(tl.int64) * CHOICES + column
    stored = (token < tokens) & (column < CHOICES)
    tl.store(chosen + place, tl.where(live, expert, nowhere), mask=stored)
    tl.store(weights + place, tl.where(live, weight, 0.0), mask=stored)


@triton.jit
def _group(
    chosen,  # [pairs]; a pair is a token and one of its choices
    order,  # [pairs] pairs by expert, and by number within one
    tile_expert,  # [tiles] −1: unused
    tile_begin,  # [tiles] its first place in `order`
    tile_end,  # [tiles] the end of its expert's places
    counts,  # [experts] pairs of each
    pairs,
    experts,
    tiles,
    TILE: tl.constexpr,  # pairs of a tile
    PAIRS: tl.constexpr,
):
    """Expert e has the tiles from floor(pairs before it / TILE) + e on.

    The next expert's first tile then lies behind its last one, whatever the sizes, and each finds
    its tiles without knowing how many the others have. Few tiles in between are unused. The last
    program has the pairs that go nowhere and the tiles that are left.
    """
    expert = tl.program_id(0)
    lane = tl.arange(0, PAIRS)
    before = 0
    for at in range(0, pairs, PAIRS):
        own = tl.load(chosen + at + lane, mask=at + lane < pairs, other=experts + 1)
        before += tl.sum((own < expert).to(tl.int32), 0)
    count = 0
    for at in range(0, pairs, PAIRS):
        own = tl.load(chosen + at + lane, mask=at + lane < pairs, other=experts + 1)
        mine = (own == expert).to(tl.int32)
        rank = tl.cumsum(mine, 0) - 1
        tl.store(order + before + count + rank, at + lane, mask=mine > 0)
        count += tl.sum(mine, 0)
    first = before // TILE + expert
    is_expert = expert < experts
    last = tl.where(is_expert, (before + count) // TILE + expert + 1, tiles)
    tl.store(counts + expert, count, mask=is_expert)
    count = tl.where(is_expert, count, 0)
    for at in range(first, last, 32):
        tile = at + tl.arange(0, 32)
        begin = (tile - first) * TILE
        tl.store(tile_expert + tile, tl.where(begin < count, expert, -1), mask=tile < last)
        tl.store(tile_begin + tile, before + begin, mask=tile < last)
        tl.store(tile_end + tile, tl.zeros([32], tl.int32) + before + count, mask=tile < last)


class Tiles(NamedTuple):
    """Pairs of a token and a choice by expert; all int32. A tile of expert −1 is unused."""

    order: Tensor  # [pairs] pairs by expert
    expert: Tensor  # [tiles]
    begin: Tensor  # [tiles] its first place in `order`
    end: Tensor  # [tiles] the end of its expert's places
    counts: Tensor  # [experts] pairs of each
    size: int  # pairs of a tile


def route(
    x: Tensor,  # [T, hidden]
    weight: Tensor,  # [experts, hidden] fp32
    bias: Tensor | None,  # [experts] fp32
    config: MixtureConfig,
    used: Tensor,  # [1] int32: tokens that are not padding
    *,
    nowhere: int,
    precision: str | None = None,
) -> tuple[Tensor, Tensor]:
    """The chosen experts [T, choices] int32 and their weights [T, choices] fp32.

    A shared expert is a further choice, of expert `config.experts` and weight 1. Padding goes to
    the expert `nowhere`, with weight 0.

    precision: of the product, as Triton names it; by default fp32 for an fp32 x, and for a bf16
    x three products in tf32, in which x is exact and the weight is rounded at its 22nd bit.
    """
    (tokens, hidden), experts = x.shape, config.experts
    if precision is None:
        precision = "ieee" if x.dtype is torch.float32 else "tf32x3"
    together = tokens > _MOST_APART
    shares = 1 if together else triton.cdiv(hidden, _SHARE)
    levels = x.new_empty((shares, tokens, experts), dtype=torch.float32)
    block_t = 16 if tokens <= 128 else 32 if tokens <= 512 else 64
    _levels[(triton.cdiv(tokens, block_t), triton.cdiv(experts, 64), shares)](
        x,
        weight,
        levels,
        tokens,
        experts,
        hidden,
        TOGETHER=together,
        PRECISION=precision,
        SHARE=_SHARE,
        BLOCK_T=block_t,
        BLOCK_E=64,
        BLOCK_K=64,
        num_warps=4,
        num_stages=2,
    )
    choices = config.per_token + (config.shared > 0)
    chosen = x.new_empty((tokens, choices), dtype=torch.int32)
    weights = x.new_empty((tokens, choices), dtype=torch.float32)
    lanes = triton.next_power_of_2(experts)
    _choose[(triton.cdiv(tokens, _ROWS),)](
        levels,
        weight if bias is None else bias,
        used,
        chosen,
        weights,
        tokens,
        config.scale,
        nowhere,
        SHARES=shares,
        EXPERTS=experts,
        LANES=lanes,
        PER_TOKEN=config.per_token,
        CHOICES=choices,
        COLUMNS=triton.next_power_of_2(choices),
        SIGMOID=config.scoring == "sigmoid",
        HAS_BIAS=bias is not None,
        GROUPS=config.groups,
        TOP_GROUPS=config.top_groups,
        RENORMALISE=config.renormalise,
        ROWS=_ROWS,
        num_warps=1,
    )
    return chosen, weights


def group(chosen: Tensor, experts: int, size: int, counts: Tensor | None = None) -> Tiles:
    """Tiles of `size` pairs. chosen: [T, choices]; from expert `experts` on a pair goes nowhere.

    counts: [experts] int32, where the number of pairs of each expert is written.
    """
    pairs = chosen.numel()
    # The most there can be, in whole 16: Triton compiles another kernel for what is not aligned.
    tiles = triton.cdiv(pairs // size + experts, 16) * 16
    found = chosen.new_empty((3, tiles))
    order = chosen.new_empty(pairs)
    counts = chosen.new_empty(experts) if counts is None else counts
    _group[(experts + 1,)](
        chosen, order, *found, counts, pairs, experts, tiles, TILE=size, PAIRS=_PAIRS, num_warps=4
    )
    return Tiles(order, *found, counts, size)


def tile_size(pairs: int, experts: int) -> int:
    """Pairs of a tile: most experts have one tile, so that their weights are read once."""
    return next((size for size in (16, 32, 64) if 3 * pairs <= 2 * size * experts), 128)
