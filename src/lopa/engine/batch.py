"""A batch: the rows of many plans on one flat token axis, laid out on the host.

Token t of row r stands at `row_begin[r] + t`; rows follow one another without padding. Only
attention needs to know about rows.
"""

from __future__ import annotations

import itertools
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
    """A few calls for all plans together: this is on the way of every round."""
    counts = [len(plan.rows) for _, plan in plans]
    by_plan = np.array([(plan.start, plan.cached, slot) for slot, plan in plans], np.int64)
    row_start, row_cached, row_slot = by_plan.repeat(counts, axis=0).T
    row_length = _joined([plan.ends for _, plan in plans]) - row_start
    row_begin = row_length.cumsum() - row_length
    size = int(row_begin[-1] + row_length[-1])
    positions = np.arange(size) - (row_begin - row_start).repeat(row_length)

    tokens, blocks, wanted, wanted_counts = [], [], [], []
    flat = 0
    for _, plan in plans:
        rows, masks = plan.rows, plan.wanted
        count, width = rows.shape
        if plan.block_ids is None:
            ids = np.zeros(rows.shape, np.int64)
        else:
            ids = plan.block_ids[None].repeat(count, axis=0)
        if plan.ends.min() < plan.start + width:  # rows of several lengths
            inside = np.arange(plan.start, plan.start + width) < plan.ends[:, None]
            rows, ids, masks = rows[inside], ids[inside], masks[inside]
        tokens.append(rows.reshape(-1))
        blocks.append(ids.reshape(-1))
        wanted.append(flat + masks.reshape(-1).nonzero()[0])
        wanted_counts.append(len(wanted[-1]))
        flat += len(tokens[-1])
    where = _joined(wanted)
    source = where
    if shift:
        # The row before; what was remembered for a window's first position; position 0 its own.
        source = where - 1
        is_first = np.zeros(size, np.bool_)
        is_first[row_begin] = True
        edge = is_first[where].nonzero()[0]
        if len(edge):
            row = np.searchsorted(row_begin, where[edge])
            source[edge] = np.where(row_start[row] > 0, -1 - row_slot[row], where[edge])
    return Batch(
        plans=list(plans),
        first_rows=[0, *itertools.accumulate(counts[:-1])],
        tokens=_joined(tokens),
        positions=positions,
        blocks=_joined(blocks),
        row_begin=row_begin,
        row_length=row_length,
        row_start=row_start,
        row_cached=row_cached,
        row_slot=row_slot,
        wanted_from=source,
        wanted_position=positions[where],
        wanted_round=np.array([plan.index for _, plan in plans]).repeat(wanted_counts),
        wanted_counts=wanted_counts,
    )


def _joined(arrays: list[IntArray]) -> IntArray:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
