"""The round view: what a round found at the positions that may be filled."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from lopa.decoding.fill import Cells
from lopa.decoding.windows import Frame
from lopa.types import BoolArray, Draft, FloatArray, IntArray, Plan, Stats


class Edits(NamedTuple):
    """What the model says of tokens that are filled already: [R, N] each."""

    doubted: BoolArray  # it predicts another one there
    token: IntArray
    max_prob: FloatArray


@dataclass
class RoundView:
    """R rows of N columns, a whole number of blocks; [R, N] each. Shorter rows have no masks at
    their end."""

    offset: int  # position of the first column
    size: int  # of a block
    masks: BoolArray
    token: IntArray
    max_prob: FloatArray
    ranking: FloatArray
    eos_ids: Collection[int]
    edits: Edits | None = None

    @classmethod
    def of(
        cls,
        plan: Plan,
        frame: Frame,
        stats: Stats,
        base: int,
        size: int,
        eos_ids: Collection[int],
        mask_id: int | None = None,
    ) -> RoundView:
        """base: where the first block starts. All that the plan wanted is in the frame's blocks.

        mask_id: with editing, which wants more than masks. Elsewhere than at masks there is no
        token and no number, so that nothing can go by what was not asked for.
        """
        offset = base + frame.first * size
        first = offset - plan.start
        here = slice(first, first + max(frame.blocks) * size)
        wanted = plan.wanted[:, here]
        arrays = np.empty(wanted.shape, np.int64), np.empty(wanted.shape), np.empty(wanted.shape)
        for array, values, elsewhere in zip(arrays, stats, (-1, math.nan, math.nan), strict=True):
            array.fill(elsewhere)
            array[wanted] = values
        token, max_prob, ranking = arrays
        if mask_id is None:
            return cls(offset, size, wanted, token, max_prob, ranking, eos_ids)
        masks = wanted & (plan.rows[:, here] == mask_id)
        edits = Edits(wanted & ~masks & (token != plan.rows[:, here]), token, max_prob)
        token = np.where(masks, token, -1)
        max_prob, ranking = (np.where(masks, x, np.nan) for x in (max_prob, ranking))
        return cls(offset, size, masks, token, max_prob, ranking, eos_ids, edits)

    @cached_property
    def is_eos(self) -> BoolArray:
        """[R, N] where the token is an EOS token. Not every rule asks."""
        return eos_mask(self.token, self.eos_ids)

    @cached_property
    def is_text(self) -> BoolArray:
        """[R, N] masks where the token is no EOS token."""
        text = self.masks
        for eos in self.eos_ids:  # there are one or two
            text = text & (self.token != eos)
        return text

    def cells(self, rows: int | list[int], frame: Frame) -> Cells:
        """What a fill rule sees of a row, or of several rows at once."""
        shape = (-1, self.size) if isinstance(rows, int) else (len(rows), -1, self.size)
        cells = Cells(
            self.masks[rows].reshape(shape),
            self.max_prob[rows].reshape(shape),
            self.ranking[rows].reshape(shape),
            frame.may_force[rows],
            frame.fresh,
        )
        if self.edits is None:
            return cells
        return cells._replace(
            doubted=self.edits.doubted[rows].reshape(shape),
            other_prob=self.edits.max_prob[rows].reshape(shape),
        )


class Anchor(NamedTuple):
    """The next anchor: the winner after its fills, over the columns of the round's view."""

    view: RoundView
    drafts: list[Draft]  # of the round
    row: int  # the winner's
    free: BoolArray  # [N] masks that are left to look ahead at, of its own blocks
    filled: BoolArray  # [N] what the round has filled, of its own blocks
    tokens: IntArray  # [N] with its fills
    may_force: BoolArray  # [blocks] fully activated, in this round
    # Whether drafts are of the winner's tokens alone: where an answer has to fit, those of one row
    # fit together, and those of two need not.
    by_own_row: bool = False
    most: int = 0  # drafts that the next round has a use for


def eos_mask(tokens: IntArray, eos_ids: Collection[int]) -> BoolArray:
    found: BoolArray | None = None
    for eos in eos_ids:  # there are one or two
        here = tokens == eos
        found = here if found is None else found | here
    return np.zeros(tokens.shape, np.bool_) if found is None else found
