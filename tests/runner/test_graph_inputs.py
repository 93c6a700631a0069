"""A buffer that is filled only with what changed equals one that is filled from scratch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lopa.kernels.triton.kv_write import PendingKVWrites
from lopa.runner import graph_inputs
from lopa.runner.batch import make_batch
from lopa.runner.graph_inputs import HostLayerInputs, LayerInputs, LayerSizes
from lopa.runner.graphs import common_sizes
from lopa.types import IntArray, Plan

GROUP = 7
SIZES = LayerSizes(tokens=96, rows=16, tiles=40)


def a_plan(generator: np.random.Generator) -> Plan:
    rows, start = int(generator.integers(1, 4)), int(generator.choice([64, 96]))
    tokens = generator.integers(0, 100, (rows, 8))
    ends = np.full(rows, start + 8)
    ends[0] -= generator.integers(0, 2)
    return Plan(1, start, start, 0, tokens, ends, tokens < 50, None)


def some_writes(generator: np.random.Generator) -> PendingKVWrites[IntArray] | None:
    count, carries = generator.integers(0, 4, 2)
    if not count:
        return None
    lengths = count, count, carries, carries
    return PendingKVWrites(*(generator.integers(0, 96, length) for length in lengths))


def empty() -> HostLayerInputs:
    return HostLayerInputs(graph_inputs.layer_buffer(SIZES), SIZES)


def contents(inputs: LayerInputs[IntArray], tokens: int, rows: int) -> list[list[int]]:
    """All that the device reads: what is unused is marked, or lies behind what is used."""
    tiles = inputs.tile_row >= 0
    writes, carries = inputs.write_source >= 0, inputs.carry_source >= 0
    return [
        *(part[:tokens].tolist() for part in (inputs.tokens, inputs.positions, inputs.blocks)),
        *(inputs.tile_row.tolist(), inputs.tile_at[tiles].tolist()),
        *(part[:rows].tolist() for part in (inputs.begin, inputs.length, inputs.start)),
        *(part[:rows].tolist() for part in (inputs.cached, inputs.slot)),
        *(inputs.write_source.tolist(), inputs.slot_mapping[writes].tolist()),
        *(inputs.carry_source.tolist(), inputs.carry_slot[carries].tolist()),
        inputs.used.tolist(),
    ]


@pytest.mark.parametrize("seed", range(8))
def test_as_if_filled_from_scratch(seed: int) -> None:
    generator = np.random.default_rng(seed)
    kept, again = empty(), 0
    plans: list[tuple[int, Plan]] = []
    for _ in range(40):
        if plans and generator.random() < 0.5:  # other tokens at the same positions
            plans = [(slot, replace(plan, rows=plan.rows + 1)) for slot, plan in plans]
        else:
            slots = generator.permutation(3)[: generator.integers(1, 3)].tolist()
            plans = [(slot, a_plan(generator)) for slot in slots]
        batch = make_batch(plans, shift=True)
        writes = some_writes(generator)
        again += kept.metadata is batch.metadata
        fresh = empty()
        for inputs in (kept, fresh):
            inputs.fill(batch, writes, GROUP)
        sizes = batch.size, len(batch.metadata.row_begin)
        assert contents(kept.arrays, *sizes) == contents(fresh.arrays, *sizes)
    assert again > 10


def test_what_has_not_changed_is_not_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch([(0, a_plan(np.random.default_rng(0)))], shift=True)
    inputs = empty()
    inputs.fill(batch, None, GROUP)

    def written_again(*given: object) -> None:
        raise AssertionError("nothing has changed")

    monkeypatch.setattr(graph_inputs, "fill_metadata", written_again)
    monkeypatch.setattr(graph_inputs, "fill_writes", written_again)
    batch.tokens = batch.tokens + 1
    inputs.fill(batch, None, GROUP)
    assert inputs.arrays.tokens[: batch.size].tolist() == batch.tokens.tolist()


@pytest.mark.parametrize("name", ["fill_metadata", "fill_writes"])
def test_after_an_interrupt_everything_is_written_again(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    generator = np.random.default_rng(1)
    first, second = (make_batch([(slot, a_plan(generator))], shift=True) for slot in range(2))
    inputs, fresh = empty(), empty()
    inputs.fill(first, None, GROUP)
    whole = getattr(graph_inputs, name)

    def interrupted(*given: object) -> None:
        whole(*given)
        raise KeyboardInterrupt

    monkeypatch.setattr(graph_inputs, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        inputs.fill(second, PendingKVWrites(*np.ones((4, 1), np.int64)), GROUP)
    monkeypatch.undo()
    for one in (inputs, fresh):
        one.fill(first, None, GROUP)
    sizes = first.size, len(first.metadata.row_begin)
    assert contents(inputs.arrays, *sizes) == contents(fresh.arrays, *sizes)


def test_nothing_is_left_of_an_earlier_round() -> None:
    sizes = graph_inputs.round_layers(40, 2, 2)
    buffer = graph_inputs.layer_buffer(sizes)
    arrays = graph_inputs.HostLayerInputs(buffer, sizes).arrays
    writes = graph_inputs.pending_writes(graph_inputs.split_layers(buffer, sizes))
    assert writes.source.eq(-1).all()
    assert writes.carry_source.eq(-1).all()
    for numbers in ([[4, 5], [8, 9], [5, 1], [0, 3]], [[6], [7], [6], [2]]):
        graph_inputs.fill_writes(arrays, PendingKVWrites(*np.array(numbers)))
    assert [int(part[0]) for part in writes] == [6, 7, 6, 2]
    assert writes.source[1:].eq(-1).all()
    assert writes.carry_source[1:].eq(-1).all()


def far_part(*starts: int, cached: int | None = None, rows: int = 8, by_cudnn: bool = True) -> int:
    """Of a round of so many rows of 64 tokens a plan."""
    tokens = np.full((rows, 64), 5)
    plans = [
        (
            slot,
            Plan(
                1,
                start,
                start if cached is None else cached,
                0,
                tokens,
                np.full(rows, start + 64),
                tokens > 0,
                None,
            ),
        )
        for slot, start in enumerate(starts)
    ]
    return graph_inputs.layer_sizes(make_batch(plans, True), GROUP, by_cudnn=by_cudnn).far


def test_the_far_part_of_a_long_prefix_is_left_to_cudnn() -> None:
    starts = 16383, 16384, 20479, 20480, 32768, 32800
    assert [far_part(start) for start in starts] == [0, 16384, 16384, 20480, 32768, 32768]
    assert far_part(30000, cached=20000) == far_part(20000, cached=30000) == 16384
    assert far_part(32768, rows=1) == 0  # few queries
    assert far_part(32768, rows=2) == 32768
    assert far_part(32768, 32768) == 0  # two sequences
    assert far_part(32768, by_cudnn=False) == 0


def test_a_warm_up_covers_every_size() -> None:
    layers, heads = map(set, common_sizes(700, GROUP))
    generator = np.random.default_rng(0)
    for _ in range(300):
        tokens = int(generator.integers(1, 701))
        rows, wanted = generator.integers(1, [min(16, tokens) + 1, tokens + 1]).tolist()
        assert graph_inputs.round_layers(tokens, rows, GROUP) in layers
        assert graph_inputs.HeadSizes(graph_inputs.round_head(wanted), False) in heads
    assert len(layers) + len(heads) < 40


def test_a_warm_up_covers_many_sessions() -> None:
    """Of rows of 32 tokens and more, as 32 sessions with 7 branches have."""
    layers = set(common_sizes(8192, GROUP, most_rows=graph_inputs.ROWS[-1])[0])
    generator = np.random.default_rng(0)
    for _ in range(300):
        rows = int(generator.integers(1, graph_inputs.ROWS[-1] + 1))
        tokens = int(generator.integers(32 * rows, 8193))
        assert graph_inputs.round_layers(tokens, rows, GROUP) in layers
    assert len(layers) < 130
