"""The layout of a batch against its description, token by token."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lopa.runner.batch import make_batch
from lopa.types import Plan


def some_plan(generator: np.random.Generator, index: int) -> Plan:
    rows, width = generator.integers(1, [5, 9]).tolist()
    start = int(generator.choice([0, 3, 64]))
    ends = start + generator.integers(1, width + 1, rows)
    if generator.random() < 0.7:  # else a part of a plan, whose longest row is elsewhere
        ends[generator.integers(rows)] = start + width
    inside = np.arange(start, start + width) < ends[:, None]
    return Plan(
        index=index,
        start=start,
        cached=int(generator.integers(0, 70)),
        commit=0,
        rows=generator.integers(0, 100, (rows, width)),
        row_ends=ends,
        wanted=inside & (generator.random((rows, width)) < 0.5),
        block_ids=generator.integers(0, 4, width) if generator.random() < 0.5 else None,
    )


@pytest.mark.parametrize("shift", [True, False])
@pytest.mark.parametrize("seed", range(30))
def test_every_token_of_every_row(seed: int, shift: bool) -> None:
    generator = np.random.default_rng(seed)
    plans = [
        (int(slot), some_plan(generator, i + 1))
        for i, slot in enumerate(generator.permutation(9)[: generator.integers(1, 5)])
    ]
    batch = make_batch(plans, shift)
    tokens, positions, blocks, rows, wanted, counts, first_rows = [], [], [], [], [], [], []
    for slot, plan in plans:
        first_rows.append(len(rows))
        before = len(wanted)
        for row, end in enumerate(plan.row_ends.tolist()):
            begin = len(tokens)
            rows.append((begin, end - plan.start, plan.start, plan.cached, slot))
            for column in range(end - plan.start):
                here = len(tokens)
                if plan.wanted[row, column]:
                    source = here
                    if shift and column:
                        source = here - 1
                    elif shift and plan.start:
                        source = -1 - slot
                    wanted.append((source, plan.start + column))
                tokens.append(plan.rows[row, column])
                positions.append(plan.start + column)
                blocks.append(0 if plan.block_ids is None else plan.block_ids[column])
        counts.append(len(wanted) - before)
    assert batch.size == len(tokens)
    assert batch.tokens.tolist() == tokens
    metadata = batch.metadata
    assert metadata.positions.tolist() == positions
    assert metadata.blocks.tolist() == blocks
    columns = (
        metadata.row_begin,
        metadata.row_length,
        metadata.row_start,
        metadata.row_cached,
        metadata.row_slot,
    )
    assert list(zip(*(c.tolist() for c in columns), strict=True)) == rows
    found = batch.wanted.source, batch.wanted.position
    assert list(zip(*(f.tolist() for f in found), strict=True)) == wanted
    assert batch.wanted.counts == counts
    assert metadata.first_rows == first_rows


def test_metadata_is_made_once() -> None:
    generator = np.random.default_rng(3)
    plans = [(2, some_plan(generator, 1)), (0, some_plan(generator, 2))]
    first = make_batch(plans, True)
    others = [
        (slot, replace(plan, index=9, rows=plan.rows + 1, row_ends=plan.row_ends.copy()))
        for slot, plan in plans
    ]
    again = make_batch(others, True)
    assert again.metadata is first.metadata
    assert (again.tokens == first.tokens + 1).all()
    with pytest.raises(ValueError, match="read-only"):
        first.metadata.positions[0] = 1
    (slot, plan), other = plans
    width = plan.rows.shape[1]
    for moved in (
        (slot + 1, plan),
        (slot, replace(plan, cached=plan.cached + 1)),
        (slot, replace(plan, start=plan.start + 1, row_ends=plan.row_ends + 1)),
        (slot, replace(plan, block_ids=np.arange(width) + 7)),
    ):
        assert make_batch([moved, other], True).metadata is not first.metadata
    assert make_batch(plans, False).metadata is first.metadata
