"""Reductions over groups of rows, the groups of very different sizes: few torch calls for all.

Groups of about one size are gathered together, padded to a power of two: a call for each size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
        found = values.new_empty(self.count + 1, values.shape[1])
        found[:-1] = values
        found[-1] = padding
        return found

    def each(self, padded: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """By size: the groups [G], their rows [G, size], and the rows' values [G, size, N]."""
        for groups, members, size in self._buckets:
            values = padded.index_select(0, members).view(-1, size, padded.shape[1])
            yield groups, members.view(-1, size), values

    def amax(self, padded: Tensor) -> Tensor:
        """[groups, N]; NOTHING for a group of nothing"""
        found = padded.new_full((self.groups, padded.shape[1]), NOTHING)
        for groups, members, values in self.each(padded):
            found[groups] = values.amax(dim=1) if members.shape[1] > 1 else values[:, 0]
        return found

    def sum(self, padded: Tensor) -> Tensor:
        """[groups, N]; for values that are padded with 0"""
        found = padded.new_zeros(self.groups, padded.shape[1])
        for groups, members, values in self.each(padded):
            found[groups] = values.sum(dim=1) if members.shape[1] > 1 else values[:, 0]
        return found
