"""A buffer that is filled only with what has changed says the same as one that is filled anew."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lopa.kernels.triton.kv_write import Moves
from lopa.runner import graph_inputs as layout
from lopa.runner.batch import make_batch
from lopa.runner.graph_inputs import Body, BodyArrays, BodySizes
from lopa.types import IntArray, Plan

GROUP = 7
SIZES = BodySizes(tokens=96, rows=16, tiles=40)


def a_plan(generator: np.random.Generator) -> Plan:
    rows, start = int(generator.integers(1, 4)), int(generator.choice([64, 96]))
    tokens = generator.integers(0, 100, (rows, 8))
    ends = np.full(rows, start + 8)
    ends[0] -= generator.integers(0, 2)
    return Plan(1, start, start, 0, tokens, ends, tokens < 50, None)


def some_moves(generator: np.random.Generator) -> Moves[IntArray] | None:
    count, carries = generator.integers(0, 4, 2)
    if not count:
        return None
    lengths = count, count, carries, carries
    return Moves(*(generator.integers(0, 96, length) for length in lengths))


def empty() -> BodyArrays:
    return BodyArrays(layout.body_buffer(SIZES), SIZES)


def told(body: Body[IntArray], tokens: int, rows: int) -> list[list[int]]:
    """All that the device reads: what is unused says so or lies behind what is used."""
    tiles = body.tile_row >= 0
    moved, carried = body.moved >= 0, body.carried >= 0
    return [
        *(part[:tokens].tolist() for part in (body.tokens, body.positions, body.blocks)),
        *(body.tile_row.tolist(), body.tile_at[tiles].tolist()),
        *(part[:rows].tolist() for part in (body.begin, body.length, body.start)),
        *(part[:rows].tolist() for part in (body.cached, body.slot)),
        *(body.moved.tolist(), body.moved_to[moved].tolist()),
        *(body.carried.tolist(), body.carried_to[carried].tolist()),
    ]


@pytest.mark.parametrize("seed", range(8))
def test_as_if_filled_anew(seed: int) -> None:
    generator = np.random.default_rng(seed)
    kept, again = empty(), 0
    plans: list[tuple[int, Plan]] = []
    for _ in range(40):
        if plans and generator.random() < 0.5:  # other tokens in the same places
            plans = [(slot, replace(plan, rows=plan.rows + 1)) for slot, plan in plans]
        else:
            slots = generator.permutation(3)[: generator.integers(1, 3)].tolist()
            plans = [(slot, a_plan(generator)) for slot in slots]
        batch = make_batch(plans, shift=True)
        moves = some_moves(generator)
        again += kept.outline is batch.outline
        fresh = empty()
        for body in (kept, fresh):
            body.fill(batch, moves, GROUP)
        sizes = batch.size, len(batch.outline.row_begin)
        assert told(kept.arrays, *sizes) == told(fresh.arrays, *sizes)
    assert again > 10


def test_the_same_tokens_are_not_told_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch([(0, a_plan(np.random.default_rng(0)))], shift=True)
    body = empty()
    body.fill(batch, None, GROUP)

    def told_again(*given: object) -> None:
        raise AssertionError("nothing has changed")

    monkeypatch.setattr(layout, "fill_outline", told_again)
    monkeypatch.setattr(layout, "fill_moves", told_again)
    batch.tokens = batch.tokens + 1
    body.fill(batch, None, GROUP)
    assert body.arrays.tokens[: batch.size].tolist() == batch.tokens.tolist()


@pytest.mark.parametrize("name", ["fill_outline", "fill_moves"])
def test_what_was_interrupted_is_done_again(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    generator = np.random.default_rng(1)
    first, second = (make_batch([(slot, a_plan(generator))], shift=True) for slot in range(2))
    body, fresh = empty(), empty()
    body.fill(first, None, GROUP)
    whole = getattr(layout, name)

    def interrupted(*given: object) -> None:
        whole(*given)
        raise KeyboardInterrupt

    monkeypatch.setattr(layout, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        body.fill(second, Moves(*np.ones((4, 1), np.int64)), GROUP)
    monkeypatch.undo()
    for one in (body, fresh):
        one.fill(first, None, GROUP)
    sizes = first.size, len(first.outline.row_begin)
    assert told(body.arrays, *sizes) == told(fresh.arrays, *sizes)
