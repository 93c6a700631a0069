"""A batch: the rows of many plans on one flat token axis, laid out on the host.

Token t of row r stands at `row_begin[r] + t`; rows follow one another without padding. Only
attention needs to know about rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lopa.sequence import IntArray, Plan


@dataclass(slots=True)
class Batch:
    """T tokens in R rows; N positions whose statistics are wanted. All integers are int64."""

    plans: list[tuple[int, Plan]]  # (slot, plan)
    first_rows: list[int]  # by plan: its first row
    tokens: IntArray  # [T]
    positions: IntArray  # [T] absolute
    blocks: IntArray  # [T] a token sees those of its row whose block is not larger
    row_begin: IntArray  # [R] first token of the row
    row_length: IntArray  # [R]
    row_start: IntArray  # [R] position of its first token
    row_cached: IntArray  # [R] cached positions 0 … are seen, those that the row holds excepted
    row_slot: IntArray  # [R]
    # [N] token whose hidden state predicts the wanted position; −1 − slot: the slot's carry
    wanted_from: IntArray
    wanted_position: IntArray  # [N]
    wanted_round: IntArray  # [N]
    wanted_counts: list[int]  # by plan

    @property
    def size(self) -> int:
        return len(self.tokens)


def make_batch(plans: Sequence[tuple[int, Plan]], shift: bool) -> Batch:
    tokens, positions, blocks = [], [], []
    lengths, starts, cached, slots = [], [], [], []
    wanted_from, wanted_position, wanted_round, counts = [], [], [], []
    first_rows = []
    rows = flat = 0
    for slot, plan in plans:
        first_rows.append(rows)
        count, width = plan.rows.shape
        own = plan.ends - plan.start  # [R] length of each row
        begin = flat + np.cumsum(own) - own
        at = np.arange(plan.start, plan.start + width)
        ids = np.zeros(width, np.int64) if plan.block_ids is None else plan.block_ids
        if own.min() == width:
            tokens.append(plan.rows.reshape(-1))
            positions.append(np.tile(at, count))
            blocks.append(np.tile(ids, count))
        else:
            inside = np.arange(width) < own[:, None]
            tokens.append(plan.rows[inside])
            positions.append(np.broadcast_to(at, inside.shape)[inside])
            blocks.append(np.broadcast_to(ids, inside.shape)[inside])
        row, column = np.nonzero(plan.wanted)
        source = begin[row] + column
        if shift:
            # The row before; what was remembered for a window's first position; position 0 its own.
            edge = -1 - slot if plan.start else begin[row]
            source = np.where(column > 0, source - 1, edge)
        wanted_from.append(source)
        wanted_position.append(plan.start + column)
        wanted_round.append(np.full(len(row), plan.index))
        counts.append(len(row))
        lengths.append(own)
        starts.append(np.full(count, plan.start))
        cached.append(np.full(count, plan.cached))
        slots.append(np.full(count, slot))
        rows += count
        flat += int(own.sum())
    row_length = _joined(lengths)
    return Batch(
        plans=list(plans),
        first_rows=first_rows,
        tokens=_joined(tokens),
        positions=_joined(positions),
        blocks=_joined(blocks),
        row_begin=np.cumsum(row_length) - row_length,
        row_length=row_length,
        row_start=_joined(starts),
        row_cached=_joined(cached),
        row_slot=_joined(slots),
        wanted_from=_joined(wanted_from),
        wanted_position=_joined(wanted_position),
        wanted_round=_joined(wanted_round),
        wanted_counts=counts,
    )


def _joined(arrays: list[IntArray]) -> IntArray:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
