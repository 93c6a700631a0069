"""The round view: what a round found at the positions that may be filled."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from lopa.decoding.fill import Cells
from lopa.decoding.windows import Frame
from lopa.types import BoolArray, Draft, FloatArray, IntArray, Plan, Stats


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

    @classmethod
    def of(
        cls, plan: Plan, frame: Frame, stats: Stats, base: int, size: int, eos_ids: Collection[int]
    ) -> RoundView:
        """base: where the first block starts. All that the plan wanted is in the frame's blocks.

        Elsewhere there is no token and no number, so that nothing can go by what was not asked for.
        """
        offset = base + frame.first * size
        first = offset - plan.start
        masks = plan.wanted[:, first : first + max(frame.blocks) * size]
        token = np.full(masks.shape, -1, np.int64)
        max_prob, ranking = np.full((2, *masks.shape), np.nan)
        for array, values in zip((token, max_prob, ranking), stats, strict=True):
            array[masks] = values
        return cls(offset, size, masks, token, max_prob, ranking, eos_ids)

    @cached_property
    def is_eos(self) -> BoolArray:
        """[R, N] where the token is an EOS token. Not every rule asks."""
        return eos_mask(self.token, self.eos_ids)

    def cells(self, rows: int | list[int], frame: Frame) -> Cells:
        """What a fill rule sees of a row, or of several rows at once."""
        shape = (-1, self.size) if isinstance(rows, int) else (len(rows), -1, self.size)
        return Cells(
            self.masks[rows].reshape(shape),
            self.max_prob[rows].reshape(shape),
            self.ranking[rows].reshape(shape),
            frame.may_force[rows],
            frame.fresh,
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


def eos_mask(tokens: IntArray, eos_ids: Collection[int]) -> BoolArray:
    found: BoolArray | None = None
    for eos in eos_ids:  # there are one or two
        here = tokens == eos
        found = here if found is None else found | here
    return np.zeros(tokens.shape, np.bool_) if found is None else found
