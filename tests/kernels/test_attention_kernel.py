"""The attention kernel against the plain equation, on random batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from plain_far_attention import small_chunks

from lopa.kernels.prefix_attention import attend_far
from lopa.kernels.triton.attention import TILE, Rows, attend, most_tiles, stages_for
from lopa.runner.attention import Span, reference_batch
from lopa.runner.kv_cache import PAGE

# (rows' lengths, cached, start, block size or None): one plan each
Case = tuple[list[int], int, int, int | None]


# Half precision has a loop of its own for whole pages.
DTYPES = {torch.float32: 1e-5, torch.float16: 2e-3}


def run(
    cases: list[Case],
    heads: int,
    kv_heads: int,
    dim: int,
    splits: int,
    dtype: torch.dtype = torch.float32,
    far: int = 0,  # tokens of the only case's prefix that are attended to apart
) -> None:
    generator = torch.Generator().manual_seed(len(cases) * heads + dim)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    widest = max(1, max(-(-cached // PAGE) for _, cached, _, _ in cases))
    total_pages = widest * len(cases) + 3
    order = torch.randperm(total_pages, generator=generator)
    table = torch.full((len(cases), widest), 10_000)  # unused entries must not be followed
    cache_k, cache_v = (normal(total_pages * PAGE, kv_heads, dim) for _ in range(2))
    tokens = sum(sum(lengths) for lengths, *_ in cases)
    qkv = normal(tokens, (heads + 2 * kv_heads) * dim)
    q, k, v = (
        x.view(tokens, -1, dim)
        for x in qkv.split([heads * dim, kv_heads * dim, kv_heads * dim], dim=1)
    )
    spans, rows, tiles = [], [], []
    blocks = torch.zeros(tokens, dtype=torch.int32)
    at = 0
    for slot, (lengths, cached, start, size) in enumerate(cases):
        count = -(-cached // PAGE)
        table[slot, :count] = order[slot * widest : slot * widest + count]
        position = np.arange(cached)
        seen = position[(position < start) | (position >= start + max(lengths))]
        prefix = table[slot].numpy()[seen // PAGE] * PAGE + seen % PAGE
        ids = None if size is None else torch.arange(max(lengths)) // size
        spans.append(Span(at, lengths, torch.from_numpy(prefix), ids))
        for length in lengths:
            for first in range(0, length * heads // kv_heads, TILE):
                tiles.append((len(rows), first))
            rows.append((at, length, start, cached, slot))
            if ids is not None:
                blocks[at : at + length] = ids[:length]
            at += length
    spare = most_tiles(tokens, len(rows), heads // kv_heads) - len(tiles)
    assert spare >= 0
    tiles += [(-1, 0)] * spare
    columns = [torch.tensor(x, dtype=torch.int32) for x in zip(*rows, strict=True)]
    tile_row, tile_at = (torch.tensor(x, dtype=torch.int32) for x in zip(*tiles, strict=True))
    layout = Rows(tile_row, tile_at, *columns, blocks, table.int())
    part = attend_far(q, cache_k, cache_v, table[0, : far // PAGE]) if far else None
    ours = attend(q, k, v, cache_k, cache_v, layout, splits=splits, far=part)
    plain = reference_batch(*(x.float() for x in (q, k, v, cache_k, cache_v)), spans)
    error = (ours.float() - plain).norm() / plain.norm()
    assert error < DTYPES[dtype]


@pytest.mark.parametrize(("splits", "dtype"), [(1, torch.float32), (3, torch.float16)])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"),
    [(7, 1, 32), (14, 2, 16), (4, 4, 64), (8, 2, 32)],  # group sizes 7, 7, 1, 4
)
def test_equals_the_equation(
    heads: int, kv_heads: int, dim: int, splits: int, dtype: torch.dtype
) -> None:
    cases: list[Case] = [([8, 8, 10], 70, 70, None), ([5], 0, 0, 4), ([7], 32, 32, 3)]
    run(cases, heads, kv_heads, dim, splits, dtype)


@pytest.mark.parametrize(
    "case",
    [
        ([20], 0, 0, None),  # no prefix
        ([1], 1, 1, None),
        ([8], PAGE, PAGE, None),  # one page
        ([8], PAGE + 1, PAGE + 1, 8),
        ([8], 64, 20, None),  # a window within what is cached
        ([24, 16], 5, 5, 8),
        ([5] * 5, 131, 131, None),
        ([3], 35 * PAGE + 5, 35 * PAGE + 5, None),  # more pages than are looked up at once
        ([PAGE + 5], 3, 3, 8),  # a window longer than a page
        ([PAGE + 1], 2 * PAGE + 2, PAGE - 5, None),  # within what is cached
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_odd_shapes(case: Case, dtype: torch.dtype) -> None:
    run([case], 7, 1, 16, 1, dtype)
    run([case], 7, 1, 16, 4, dtype)


def test_more_pages_than_are_looked_up_at_once_in_each_part() -> None:
    run([([2], 67 * PAGE, 67 * PAGE, None)], 2, 1, 16, 2, torch.float16)


@pytest.mark.parametrize(("splits", "dtype"), list(zip((1, 3), DTYPES, strict=True)))
@pytest.mark.parametrize(
    ("case", "far"),
    [
        (([16] * 3, 4 * PAGE, 4 * PAGE, None), 4),  # nothing but the window is left
        (([16, 9], 4 * PAGE + 5, 4 * PAGE + 5, 8), 4),
        (([13], 7 * PAGE, 7 * PAGE, None), 2),
        (([9], 5 * PAGE + 1, 2 * PAGE + 3, None), 2),  # a window within what is cached
    ],
)
def test_a_far_part_is_merged(
    monkeypatch: pytest.MonkeyPatch, case: Case, far: int, splits: int, dtype: torch.dtype
) -> None:
    """far: pages."""
    small_chunks(monkeypatch)
    run([case], 14, 2, 16, splits, dtype, far * PAGE)


@pytest.mark.parametrize(
    ("programs", "dim", "memory", "stages"),
    [
        (112, 128, 226, 4),  # an H200: each program has a multiprocessor to itself
        (224, 128, 226, 3),  # two of them share one
        (112, 256, 226, 3),
        (112, 128, 98, 2),  # a desktop GPU
        (224, 64, 98, 3),
        (112, 256, 48, 1),
    ],
)
def test_stages_go_by_programs_and_shared_memory(
    programs: int, dim: int, memory: int, stages: int
) -> None:
    """memory: KiB."""
    assert stages_for(programs, 2 * dim, memory * 1024) == stages


def test_heads_must_lie_side_by_side() -> None:
    x = torch.zeros(4, 2, 16).transpose(0, 1)
    empty = torch.zeros(0, dtype=torch.int32)
    with pytest.raises(ValueError, match="side by side"):
        attend(x, x, x, x, x, Rows(*[empty] * 9))
