from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lopa.distributed.row_assignment import RowAssignment, assign_rows
from lopa.distributed.stats_codec import HEADER, Packing
from lopa.types import Plan, Stats


@st.composite
def plans(draw: st.DrawFn) -> list[Plan]:
    return [
        a_plan(
            draw(st.integers(1, 15)),
            draw(st.integers(1, 40)),
            draw(st.sampled_from([0, 1])),
            draw(st.booleans()),
            draw(st.integers(0, 99)),
        )
        for _ in range(draw(st.integers(1, 5)))
    ]


def a_plan(rows: int, length: int, commit: int, block: bool, seed: int = 0) -> Plan:
    random = np.random.default_rng(seed)
    return Plan(
        index=1,
        start=8,
        cached=8,
        commit=commit,
        rows=random.integers(0, 99, (rows, length)),
        row_ends=np.full(rows, 8 + length),
        wanted=random.random((rows, length)) < 0.5,
        block_ids=np.zeros(length, np.int64) if block else None,
    )


@settings(deadline=None)
@given(plans(), st.integers(1, 9))
def test_every_row_has_one_owner_and_work_is_even(plans: list[Plan], ranks: int) -> None:
    assignments = assign_rows(list(enumerate(plans)), ranks)
    work = np.zeros(ranks)
    for plan, assignment in zip(plans, assignments, strict=True):
        for row, owner in enumerate(assignment.owner):
            assert assignment.holds(int(owner), row)
        for rank in range(ranks):
            work[rank] += len(assignment.rows[rank]) * plan.rows.shape[1]
            own = assignment.owner[assignment.rows[rank]] == rank
            assert own.sum() == (assignment.owner == rank).sum()
            assert (
                assignment.rows_of(plan, rank).wanted.sum()
                == plan.wanted[assignment.owner == rank].sum()
            )
    # Nobody has more than one row's work above another, lone rows aside.
    if all(len(p.rows) > 1 for p in plans):
        assert work.max() - work.min() <= max(p.rows.shape[1] for p in plans)


@settings(deadline=None)
@given(plans(), st.integers(1, 9))
def test_under_block_attention_everyone_can_commit(plans: list[Plan], ranks: int) -> None:
    for plan, assignment in zip(plans, assign_rows(list(enumerate(plans)), ranks), strict=True):
        if plan.commit and plan.block_ids is not None:
            assert all(len(rows) for rows in assignment.rows)


def test_a_lone_row_is_forwarded_by_everyone_when_it_commits() -> None:
    (assignment,) = assign_rows([(0, a_plan(1, 8, 1, block=False))], 3)
    assert [rows.tolist() for rows in assignment.rows] == [[0], [0], [0]]
    for slot in range(5):  # a sequence's lone row stays where it is
        (assignment,) = assign_rows([(slot, a_plan(1, 8, 0, block=False))], 3)
        assert [len(rows) for rows in assignment.rows] == [rank == slot % 3 for rank in range(3)]


def test_a_faster_rank_gets_more() -> None:
    (assignment,) = assign_rows([(0, a_plan(8, 8, 0, block=False))], 2, weights=[3.0, 1.0])
    assert [len(rows) for rows in assignment.rows] == [6, 2]


@settings(deadline=None)
@given(plans(), st.integers(1, 5), st.integers(1, 3), st.booleans(), st.data())
def test_what_is_packed_is_unpacked(
    plans: list[Plan], ranks: int, parts: int, wide: bool, data: st.DataObject
) -> None:
    assignments = assign_rows(list(enumerate(plans)), ranks)
    packing = Packing(plans, assignments, ranks, parts, wide)
    random = np.random.default_rng(0)
    real = np.float64 if wide else np.float32
    whole = [
        Stats(
            random.integers(0, 2**31 - 1, count),
            random.random(count).astype(real),
            -random.random(count).astype(real),
        )
        for count in (int(plan.wanted.sum()) for plan in plans)
    ]
    late = data.draw(st.integers(-1, len(plans) - 1))  # one that wants another forward
    gathered = np.stack(
        [
            packing.pack(
                branch, part, (branch, part, 0.5), own(plans, whole, assignments, branch, late)
            )
            for branch in range(ranks)
            for part in range(parts)
        ]
    )
    assert packing.headers(gathered)["state"].tolist() == [
        b for b in range(ranks) for _ in range(parts)
    ]
    for index, (expected, found) in enumerate(zip(whole, packing.unpack(gathered), strict=True)):
        if index == late:
            assert found is None
            continue
        assert found is not None
        for array, values in zip(found, expected, strict=True):
            np.testing.assert_array_equal(array, values)


def own(
    plans: list[Plan], whole: list[Stats], assignments: list[RowAssignment], branch: int, late: int
) -> list[Stats | None]:
    """What a replica has found: its part of each plan; of the late plan one owner has nothing."""
    found: list[Stats | None] = []
    for index, (plan, stats, assignment) in enumerate(zip(plans, whole, assignments, strict=True)):
        cut = assignment.rows_of(plan, branch)
        if index == late and assignment.owner[0] == branch:
            found.append(None)
            continue
        rows = np.zeros((3, *plan.rows.shape))
        rows[:, plan.wanted] = stats
        found.append(Stats(*(of_rows[assignment.rows[branch]][cut.wanted] for of_rows in rows)))
    return found


def test_a_round_of_the_paper_is_small() -> None:
    """k = 7, 96 tokens, all masks: what all ranks together send, by the number of ranks."""
    plan = a_plan(8, 96, 0, block=False)
    plan.wanted[:] = True
    for ranks in (2, 3, 4, 8, 16):
        sent = ranks * Packing([plan], assign_rows([(0, plan)], ranks), ranks, 1, False).size()
        assert 8 * 96 * 12 + HEADER.itemsize < sent < 64 * 1024
