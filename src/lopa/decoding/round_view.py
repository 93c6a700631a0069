"""The round view: what a round found at the positions that may be filled."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lopa.decoding.fill import Cells
from lopa.decoding.windows import Frame
from lopa.types import BoolArray, FloatArray, IntArray, Plan, Stats


@dataclass
class RoundView:
    """R rows of N columns, a whole number of blocks; [R, N] each. Shorter rows have no masks at
    their end."""

    offset: int  # position of the first column
    masks: BoolArray
    token: IntArray
    max_prob: FloatArray
    ranking: FloatArray
    eos_ids: Collection[int]

    @classmethod
    def of(
        cls, plan: Plan, stats: Stats, offset: int, width: int, eos_ids: Collection[int]
    ) -> RoundView:
        """Everything that the plan wanted is in these `width` columns.

        Elsewhere there is no token and no number, so that nothing can go by what was not asked for.
        """
        first = offset - plan.start
        masks = plan.wanted[:, first : first + width]
        token = np.full(masks.shape, -1, np.int64)
        max_prob, ranking = np.full((2, *masks.shape), np.nan)
        for array, values in zip((token, max_prob, ranking), stats, strict=True):
            array[masks] = values
        return cls(offset, masks, token, max_prob, ranking, eos_ids)

    @cached_property
    def is_eos(self) -> BoolArray:
        """[R, N] where the token is an EOS token. Not every rule asks."""
        return eos_mask(self.token, self.eos_ids)

    def cells(self, row: int, frame: Frame, size: int) -> Cells:
        """What the fill rule sees of a row: its own blocks."""
        shape = blocks, _ = frame.blocks[row], size
        end = blocks * size
        return Cells(
            self.masks[row, :end].reshape(shape),
            self.max_prob[row, :end].reshape(shape),
            self.ranking[row, :end].reshape(shape),
            frame.may_force[row, :blocks],
        )


def eos_mask(tokens: IntArray, eos_ids: Collection[int]) -> BoolArray:
    found: BoolArray | None = None
    for eos in eos_ids:  # there are one or two
        here = tokens == eos
        found = here if found is None else found | here
    return np.zeros(tokens.shape, np.bool_) if found is None else found
