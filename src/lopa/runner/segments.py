"""Reductions over groups of rows, the groups of very different sizes: few torch calls for all.

Groups of about one size are gathered together, padded to a power of two: a call for each size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lopa.types import IntArray

NOTHING = -1e30  # what padding reads: less than any logit, and finite, so that 0 · NOTHING is 0


class _Bucket(NamedTuple):
    groups: Tensor  # [G] which
    members: Tensor  # [G · size] rows, the last one of all for padding
    size: int


class Segments:
    """Groups of the rows 0 … count − 1. A row may be in several groups, or in none."""

    def __init__(self, groups: Sequence[IntArray], count: int, device: torch.device) -> None:
        """groups: the rows of each, in ascending order"""
        self.count, self.groups = count, len(groups)
        sizes = np.array([len(group) for group in groups], np.int64)
        widths = np.where(sizes > 0, 1 << np.ceil(np.log2(np.maximum(sizes, 1))).astype(int), 0)
        self._buckets = []
        for width in np.unique(widths[widths > 0]).tolist():
            which = np.flatnonzero(widths == width)
            members = np.full((len(which), width), count, np.int64)
            for line, group in zip(members, which.tolist(), strict=True):
                line[: sizes[group]] = groups[group]
            self._buckets.append(
                _Bucket(
                    torch.from_numpy(which).to(device),
                    torch.from_numpy(members.reshape(-1)).to(device),
                    width,
                )
            )

    def padded(self, values: Tensor, padding: float = NOTHING) -> Tensor:
        """values [count, N] with one more row, which is what the other methods take."""
        return torch.cat([values, values.new_full((1, values.shape[1]), padding)])

    def max(self, padded: Tensor) -> tuple[Tensor, Tensor]:
        """The largest of each group and its row, of equals the first: [groups, N] each.

        A group of nothing has NOTHING, and no row."""
        shape = self.groups, padded.shape[1]
        found = padded.new_full(shape, NOTHING)
        row = torch.full(shape, self.count, dtype=torch.int64, device=padded.device)
        for groups, members, size in self._buckets:
            if size == 1:
                found[groups], row[groups] = padded[members], members[:, None]
                continue
            values, place = self._gathered(padded, members, size).max(dim=1)
            found[groups] = values
            row[groups] = members.view(-1, size).gather(1, place)
        return found, row

    def amax(self, padded: Tensor) -> Tensor:
        found = padded.new_full((self.groups, padded.shape[1]), NOTHING)
        for groups, members, size in self._buckets:
            found[groups] = self._gathered(padded, members, size).amax(dim=1)
        return found

    def sum(self, padded: Tensor) -> Tensor:
        """[groups, N]; for values that are padded with 0."""
        found = padded.new_zeros(self.groups, padded.shape[1])
        for groups, members, size in self._buckets:
            found[groups] = self._gathered(padded, members, size).sum(dim=1)
        return found

    def _gathered(self, padded: Tensor, members: Tensor, size: int) -> Tensor:
        return padded.index_select(0, members).view(-1, size, padded.shape[1])
