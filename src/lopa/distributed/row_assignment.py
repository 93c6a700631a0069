"""Which rank forwards which rows. Pure: every rank computes the same answer by itself.

Rows go to whoever has least to do, so k + 1 need not divide by the number of ranks and several
sequences even each other out. Where every rank is to write a commit itself, one that has no row of
that sequence forwards a copy of one. A row that is alone always has the same owner: a long prompt
takes several forwards, and whoever began it goes on.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from lopa.types import IntArray, Plan


@dataclass(slots=True)
class RowAssignment:
    """How the rows of one plan are spread over the ranks."""

    owner: IntArray  # [R] the rank whose statistics of the row count
    rows: list[IntArray]  # by rank: the rows it forwards, its own and perhaps a copy

    def cut(self, plan: Plan, rank: int) -> Plan:
        """The plan of one rank. Of a copy nothing is wanted but its keys and values."""
        rows = self.rows[rank]
        wanted = plan.wanted[rows]
        wanted[self.owner[rows] != rank] = False
        return replace(plan, rows=plan.rows[rows], row_ends=plan.row_ends[rows], wanted=wanted)

    def holds(self, rank: int, row: int) -> bool:
        return bool((self.rows[rank] == row).any())


def assign_rows(
    plans: Sequence[tuple[int, Plan]], ranks: int, weights: Sequence[float] | None = None
) -> list[RowAssignment]:
    """plans: with the slots they are of. weights: how fast each rank is; equal unless given."""
    speed = [1.0] * ranks if weights is None else list(weights)
    heap = [(0.0, rank) for rank in range(ranks)]
    assignments = []
    for slot, plan in plans:
        count, length = plan.rows.shape
        owner = np.full(count, slot % ranks)
        for row in range(count if count > 1 else 0):
            load, rank = heap[0]
            owner[row] = rank
            heapq.heapreplace(heap, (load + length / speed[rank], rank))
        rows = [np.flatnonzero(owner == rank) for rank in range(ranks)]
        if copied(plan):
            rows = [own if len(own) else np.array([count - 1]) for own in rows]
        # What the heap does not know yet: copies, and a row that was not given to the least busy.
        extra = [len(rows[rank]) if count == 1 or rank not in owner else 0 for rank in range(ranks)]
        heap = [(load + extra[rank] * length / speed[rank], rank) for load, rank in heap]
        heapq.heapify(heap)
        assignments.append(RowAssignment(owner, rows))
    return assignments


def copied(plan: Plan) -> bool:
    """Whether a rank without a row of this plan forwards a copy, so that it can commit it.

    Under block attention a finished block's keys and values are the same in every row. Under full
    attention they are the winner's own; where there is one row, as in a prompt's first round, that
    is the winner, and to forward a prompt everywhere is simpler than to send what came of it.
    """
    return plan.commit > 0 and (plan.block_ids is not None or len(plan.rows) == 1)
