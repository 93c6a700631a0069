"""A batch: the rows of many plans on one flat token axis, laid out on the host.

Token t of row r is at `row_begin[r] + t`; rows follow one another without padding. Only attention
reads the rows, and only the head reads `wanted`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from lopa.types import BoolArray, IntArray, Plan

_T = TypeVar("_T", bound=np.generic)


class Wanted(NamedTuple):
    """The N positions whose statistics are wanted."""

    # [N] token whose hidden state predicts the position; −1 − slot: the slot's carry
    source: IntArray
    position: IntArray  # [N]
    counts: list[int]  # by plan


class BatchMetadata(NamedTuple):
    """Everything about T tokens in R rows but the tokens themselves. Arrays are int64, read-only.

    Rounds share one object as long as no window moves and no row comes or goes, so a buffer that
    was filled from this very object need not be filled again.
    """

    first_rows: list[int]  # by plan: its first row
    inside: list[BoolArray | None]  # by plan: which of its cells are tokens; None: all, no mask
    positions: IntArray  # [T] absolute
    blocks: IntArray  # [T] a token attends to those of its row whose block is not larger
    row_begin: IntArray  # [R] first token of the row
    row_length: IntArray  # [R]
    row_start: IntArray  # [R] position of its first token
    row_cached: IntArray  # [R] it attends to so many cached positions, less those in its window
    row_slot: IntArray  # [R]


@dataclass(slots=True)
class Batch:
    plans: list[tuple[int, Plan]]  # (slot, plan)
    metadata: BatchMetadata
    tokens: IntArray  # [T]
    is_wanted: BoolArray  # [T]
    shift: bool  # a hidden state predicts the position behind its own
    _wanted: Wanted | None = None

    @property
    def size(self) -> int:
        return len(self.tokens)

    @property
    def is_constrained(self) -> bool:
        """Whether any answer has to fit an automaton."""
        return any(plan.constraint is not None for _, plan in self.plans)

    @property
    def is_one_whole_row(self) -> bool:
        """Whether all its tokens see each other and nothing else."""
        metadata = self.metadata
        if len(metadata.row_begin) > 1 or metadata.row_cached[0]:
            return False
        return bool((metadata.blocks == metadata.blocks[0]).all())

    @property
    def wanted(self) -> Wanted:
        """Computed when it is first read: by then the device is running the layers."""
        if self._wanted is None:
            self._wanted = self._find_wanted()
        return self._wanted

    @property
    def expected(self) -> IntArray | None:
        """[N] of the wanted positions, as Plan says; None where no plan has any."""
        if all(plan.expected is None for _, plan in self.plans):
            return None
        counts = self.wanted.counts
        each = [
            np.full(count, -1) if plan.expected is None else plan.expected[plan.wanted]
            for (_, plan), count in zip(self.plans, counts, strict=True)
        ]
        return np.concatenate(each)

    def _find_wanted(self) -> Wanted:
        metadata = self.metadata
        where = self.is_wanted.nonzero()[0]
        source = where
        if self.shift:
            # The token before; at a window's start the slot's carry; at position 0 itself.
            source = where - 1
            edge = self.is_wanted[metadata.row_begin].nonzero()[0]  # rows
            if len(edge):
                begin = metadata.row_begin[edge]
                carry = -1 - metadata.row_slot[edge]
                first = np.where(metadata.row_start[edge] > 0, carry, begin)
                source[where.searchsorted(begin)] = first
        last_rows = [*metadata.first_rows[1:], len(metadata.row_begin)]
        row_ends = metadata.row_begin + metadata.row_length
        last = [int(row_ends[row - 1]) for row in last_rows]
        upto = [0, *where.searchsorted(last).tolist()]
        counts = [b - a for a, b in itertools.pairwise(upto)]
        return Wanted(source, metadata.positions[where], counts)


def make_batch(plans: Sequence[tuple[int, Plan]], shift: bool) -> Batch:
    """A few numpy calls for all plans together: the device is idle meanwhile, every round."""
    metadata = _metadata(tuple(_shape(slot, plan) for slot, plan in plans))
    tokens, wanted = [], []
    for (_, plan), inside in zip(plans, metadata.inside, strict=True):
        tokens.append(plan.rows.reshape(-1) if inside is None else plan.rows[inside])
        wanted.append(plan.wanted.reshape(-1) if inside is None else plan.wanted[inside])
    return Batch(list(plans), metadata, _joined(tokens), _joined(wanted), shift)


class _Shape(NamedTuple):
    """What of a plan goes into the metadata. Hashable: arrays are kept as their bytes."""

    slot: int
    start: int
    cached: int
    width: int  # L, which may be more than any of the rows has
    row_ends: bytes  # [R] int64
    block_ids: bytes | None  # [L] int64


def _shape(slot: int, plan: Plan) -> _Shape:
    ids = None if plan.block_ids is None else plan.block_ids.tobytes()
    return _Shape(slot, plan.start, plan.cached, plan.rows.shape[1], plan.row_ends.tobytes(), ids)


@lru_cache(maxsize=64)  # most rounds differ from the one before in their tokens alone
def _metadata(shapes: tuple[_Shape, ...]) -> BatchMetadata:
    ends = [np.frombuffer(shape.row_ends, np.int64) for shape in shapes]
    counts = [len(of_plan) for of_plan in ends]
    by_plan = np.array([(shape.start, shape.cached, shape.slot) for shape in shapes], np.int64)
    row_start, row_cached, row_slot = by_plan.repeat(counts, axis=0).T
    row_length = _joined(ends) - row_start
    row_begin = row_length.cumsum() - row_length
    size = int(row_begin[-1] + row_length[-1])
    positions = np.arange(size) - (row_begin - row_start).repeat(row_length)

    all_inside: list[BoolArray | None] = []
    blocks = np.zeros(size, np.int64)
    flat = 0
    for shape, of_plan in zip(shapes, ends, strict=True):
        inside = np.arange(shape.start, shape.start + shape.width) < of_plan[:, None]
        if shape.block_ids is not None:
            ids = np.frombuffer(shape.block_ids, np.int64)[None].repeat(len(of_plan), axis=0)
            blocks[flat : flat + inside.sum()] = ids[inside]
        flat += int(inside.sum())
        inside.flags.writeable = False
        all_inside.append(None if inside.all() else inside)
    arrays = positions, blocks, row_begin, row_length, row_start, row_cached, row_slot
    for array in arrays:
        array.flags.writeable = False
    return BatchMetadata([0, *itertools.accumulate(counts[:-1])], all_inside, *arrays)


def _joined(arrays: list[npt.NDArray[_T]]) -> npt.NDArray[_T]:
    """Without a copy where there is one plan, the usual case."""
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
