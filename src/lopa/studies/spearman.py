"""Spearman's rank correlation, with ties; no statistics package is needed for it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lopa.types import FloatArray


def spearman(first: Sequence[float], second: Sequence[float]) -> float | None:
    """From −1 to 1; None where one of the two does not vary, or there are fewer than two pairs."""
    if len(first) < 2:
        return None
    a, b = _ranks(first), _ranks(second)
    if a.std() == 0 or b.std() == 0:
        return None
    return float(np.corrcoef(a, b)[0, 1])


def _ranks(values: Sequence[float]) -> FloatArray:
    """Places from 0; equal values share the mean of theirs."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    ranks: FloatArray = (ends - (counts + 1) / 2)[place]
    return ranks
