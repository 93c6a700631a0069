"""Seen: what a round found at the positions that may be filled."""

from __future__ import annotations

from typing import NamedTuple

from lopa.decoding.fill import Cells
from lopa.decoding.windows import Frame
from lopa.sequence import BoolArray, FloatArray, IntArray


class Seen(NamedTuple):
    """R rows of N columns, a whole number of blocks; [R, N] each. Shorter rows have no masks at
    their end."""

    offset: int  # position of the first column
    masks: BoolArray
    token: IntArray
    max_prob: FloatArray
    ranking: FloatArray
    ends: BoolArray  # where the token is an end of text

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
