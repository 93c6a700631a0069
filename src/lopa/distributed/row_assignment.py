"""Which replica forwards which rows. Pure: every rank computes the same answer by itself.

A row goes to the replica with least to do, so k + 1 need not divide by the number of replicas and
several sequences even each other out. Where every replica writes a commit itself, one without a row
of that sequence forwards a copy. A lone row, such as a long prompt, always has the same owner.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from lopa.types import IntArray, Plan


@dataclass(slots=True)
class RowAssignment:
    """How the rows of one plan are spread over the replicas."""

    owner: IntArray  # [R] the replica whose statistics of the row count
    rows: list[IntArray]  # by replica: the rows it forwards, its own and perhaps a copy

    def rows_of(self, plan: Plan, replica: int) -> Plan:
        """The plan of one replica. Of a copy nothing is wanted but its keys and values."""
        rows = self.rows[replica]
        wanted = plan.wanted[rows]
        wanted[self.owner[rows] != replica] = False
        expected = None if plan.expected is None else plan.expected[rows]
        return replace(
            plan,
            rows=plan.rows[rows],
            row_ends=plan.row_ends[rows],
            wanted=wanted,
            expected=expected,
        )

    def holds(self, replica: int, row: int) -> bool:
        return bool((self.rows[replica] == row).any())


def assign_rows(
    plans: Sequence[tuple[int, Plan]], replicas: int, weights: Sequence[float] | None = None
) -> list[RowAssignment]:
    """plans: with the slots they are of. weights: how fast each replica is; equal unless given."""
    speed = [1.0] * replicas if weights is None else list(weights)
    heap = [(0.0, replica) for replica in range(replicas)]
    assignments = []
    for slot, plan in plans:
        count, length = plan.rows.shape
        owner = np.full(count, slot % replicas)
        for row in range(count if count > 1 else 0):
            load, replica = heap[0]
            owner[row] = replica
            heapq.heapreplace(heap, (load + length / speed[replica], replica))
        rows = [np.flatnonzero(owner == replica) for replica in range(replicas)]
        if is_replicated(plan):
            rows = [own if len(own) else np.array([count - 1]) for own in rows]
        # What the heap does not know yet: copies, and a row that was not given to the least busy.
        extra = [len(own) if count == 1 or r not in owner else 0 for r, own in enumerate(rows)]
        heap = [(load + extra[r] * length / speed[r], r) for load, r in heap]
        heapq.heapify(heap)
        assignments.append(RowAssignment(owner, rows))
    return assignments


def is_replicated(plan: Plan) -> bool:
    """Whether a replica without a row of this plan forwards a copy, so that it can commit it.

    Under block attention a finished block's keys and values are the same in every row. Under full
    attention they are the winner's own; where there is one row, as in a prompt's first round, that
    is the winner, and to forward a prompt everywhere is simpler than to send what came of it.
    """
    return plan.commit > 0 and (plan.block_ids is not None or len(plan.rows) == 1)
