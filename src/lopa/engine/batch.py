"""A batch: the rows of many plans on one flat token axis, laid out on the host.

Token t of row r stands at `row_begin[r] + t`; rows follow one another without padding. Only
attention needs to know about rows, and only the head about what is wanted: that is found when it is
asked for, by when the device can be at the layers.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from lopa.sequence import BoolArray, IntArray, Plan

_T = TypeVar("_T", bound=np.generic)


class Wanted(NamedTuple):
    """The N positions whose statistics are wanted."""

    # [N] token whose hidden state predicts the position; −1 − slot: the slot's carry
    source: IntArray
    position: IntArray  # [N]
    round: IntArray  # [N]
    counts: list[int]  # by plan


@dataclass(slots=True)
class Batch:
    """T tokens in R rows. All integers are int64."""

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
    is_wanted: BoolArray  # [T]
    shift: bool  # a hidden state predicts the position behind its own
    _wanted: Wanted | None = None

    @property
    def size(self) -> int:
        return len(self.tokens)

    @property
    def wanted(self) -> Wanted:
        if self._wanted is None:
            self._wanted = self._find_wanted()
        return self._wanted

    def _find_wanted(self) -> Wanted:
        where = self.is_wanted.nonzero()[0]
        source = where
        if self.shift:
            # The row before; what was remembered for a window's first position; position 0 its own.
            source = where - 1
            edge = self.is_wanted[self.row_begin].nonzero()[0]  # rows
            if len(edge):
                begin = self.row_begin[edge]
                carried = np.where(self.row_start[edge] > 0, -1 - self.row_slot[edge], begin)
                source[where.searchsorted(begin)] = carried
        ends = [*self.first_rows[1:], len(self.row_begin)]
        last = [int(self.row_begin[end - 1] + self.row_length[end - 1]) for end in ends]
        upto = [0, *where.searchsorted(last).tolist()]
        counts = [b - a for a, b in itertools.pairwise(upto)]
        rounds = np.array([plan.index for _, plan in self.plans]).repeat(counts)
        return Wanted(source, self.positions[where], rounds, counts)


def make_batch(plans: Sequence[tuple[int, Plan]], shift: bool) -> Batch:
    """A few calls for all plans together: this is on the way of every round."""
    counts = [len(plan.rows) for _, plan in plans]
    by_plan = np.array([(plan.start, plan.cached, slot) for slot, plan in plans], np.int64)
    row_start, row_cached, row_slot = by_plan.repeat(counts, axis=0).T
    row_length = _joined([plan.ends for _, plan in plans]) - row_start
    row_begin = row_length.cumsum() - row_length
    size = int(row_begin[-1] + row_length[-1])
    is_even = size == sum(plan.rows.size for _, plan in plans)  # else some rows are shorter
    positions = np.arange(size) - (row_begin - row_start).repeat(row_length)

    tokens, wanted = [], []
    blocks = np.zeros(size, np.int64)
    flat = 0
    for _, plan in plans:
        rows, masks, ids = plan.rows, plan.wanted, plan.block_ids
        count, width = rows.shape
        inside = None
        if not is_even:
            inside = np.arange(plan.start, plan.start + width) < plan.ends[:, None]
            rows, masks = rows[inside], masks[inside]
        if ids is not None:
            ids = ids[None].repeat(count, axis=0)
            ids = ids.reshape(-1) if inside is None else ids[inside]
            blocks[flat : flat + len(ids)] = ids
        tokens.append(rows.reshape(-1))
        wanted.append(masks.reshape(-1))
        flat += len(tokens[-1])
    return Batch(
        plans=list(plans),
        first_rows=[0, *itertools.accumulate(counts[:-1])],
        tokens=_joined(tokens),
        positions=positions,
        blocks=blocks,
        row_begin=row_begin,
        row_length=row_length,
        row_start=row_start,
        row_cached=row_cached,
        row_slot=row_slot,
        is_wanted=_joined(wanted),
        shift=shift,
    )


def _joined(arrays: list[npt.NDArray[_T]]) -> npt.NDArray[_T]:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
