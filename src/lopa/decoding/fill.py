"""Fill rules: which masks of a window are fixed in a round.

A rule sees the winner's active blocks as arrays of shape [blocks, block size] and returns which
cells to fix and which of those it had to force. Every rule is a plain function of its arguments;
`forced` marks fills that did not pass a test but had to be made to get on.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from lopa.types import BoolArray, FloatArray, IntArray

_SCHEDULE_END = 1e-3  # Dream's eps: the timestep that its schedule ends on


class Cells(NamedTuple):
    """The winner's active blocks: [blocks, block size] each, `may_force` [blocks]."""

    mask: BoolArray
    max_prob: FloatArray
    ranking: FloatArray
    may_force: BoolArray


class Filled(NamedTuple):
    chosen: BoolArray  # [blocks, block size]
    forced: BoolArray  # [blocks, block size], a part of chosen


def above_threshold(cells: Cells, threshold: float) -> Filled:
    """D2F: every mask above the threshold; a fully activated block without one forces its best."""
    chosen = cells.mask & (cells.max_prob > np.float32(threshold))
    forced = np.zeros(chosen.shape, np.bool_)
    for block in cells.may_force.nonzero()[0].tolist():
        if not np.count_nonzero(chosen[block]):
            masks = cells.mask[block].nonzero()[0]
            if len(masks):
                best = masks[cells.ranking[block, masks].argmax()]
                chosen[block, best] = forced[block, best] = True
    return Filled(chosen, forced)


def best_and_threshold(cells: Cells, threshold: float) -> Filled:
    """Fast-dLLM: the best of each block, and every other mask at or above the threshold."""
    passed = cells.mask & (cells.max_prob >= threshold)
    chosen = passed | _best(cells)
    return Filled(chosen, chosen & ~passed)


def by_factor(cells: Cells, factor: float) -> Filled:
    """Fast-dLLM's factor: with confidences c1 ≥ c2 ≥ …, accept those before the first
    c_k < 1 − factor / (k + 1), at least one; reaching the last accepts the last too."""
    flat = np.flatnonzero(cells.mask.ravel())
    confidence = cells.max_prob.ravel()[flat].astype(np.float64)
    order = np.argsort(-confidence, kind="stable")
    ranked = confidence[order]
    limits = 1.0 - factor / (np.arange(1, len(flat) + 1) + 1.0)
    fails = np.flatnonzero(ranked[1:] < limits[1:]) + 1  # the first test is skipped
    accept = int(fails[0]) if len(fails) else len(flat)
    if len(fails) and accept == len(flat) - 1:
        accept = len(flat)  # the published walk ends on the last index and takes it along
    return _take(cells, flat[order[:accept]])


def best_count(cells: Cells, count: int) -> Filled:
    """The `count` most confident masks of the window."""
    flat = np.flatnonzero(cells.mask.ravel())
    order = np.argsort(-cells.ranking.ravel()[flat], kind="stable")
    return _take(cells, flat[order[:count]])


def quota_or_threshold(cells: Cells, quota: int, threshold: float) -> Filled:
    """SDAR: every mask above the threshold if they fill the quota, else the quota's best."""
    passed = cells.mask & (cells.max_prob > np.float32(threshold))
    if passed.sum() >= quota:
        return Filled(passed, np.zeros_like(passed))
    best = best_count(cells, quota).chosen
    return Filled(best, best & ~passed)


def first_count(cells: Cells, count: int) -> Filled:
    """The `count` first masks of the window."""
    return _take(cells, np.flatnonzero(cells.mask.ravel())[:count])


def leftmost(cells: Cells) -> Filled:
    """The first cell alone, whatever its confidence."""
    chosen = np.zeros_like(cells.mask)
    chosen[0, 0] = cells.mask[0, 0]
    return Filled(chosen, chosen.copy())


def schedule_count(masks: int, step: int, steps: int) -> int:
    """How many masks Dream's linear schedule fixes at `step` (from 0) of `steps`."""
    if step >= steps - 1:
        return masks
    times = dream_timesteps(steps)
    share = np.float32(1) - times[step + 1] / times[step]
    return int(np.float32(masks) * share)


@lru_cache(maxsize=16)
def dream_timesteps(steps: int) -> FloatArray:
    """From torch itself: its float32 rounding decides counts that fall on a whole number."""
    import torch  # here, so that nothing else of decoding needs it

    times: FloatArray = torch.linspace(1, _SCHEDULE_END, steps + 1).numpy()
    return times


def block_quota(masks: int, step: int, steps: int) -> int:
    """Masks shared evenly over the steps of a block, the remainder given to the first ones."""
    if step >= steps:
        return masks
    share, rest = divmod(masks, steps)
    return share + (step < rest)


def _best(cells: Cells) -> BoolArray:
    best = np.where(cells.mask, cells.ranking, -math.inf).argmax(axis=1)
    chosen = np.zeros_like(cells.mask)
    chosen[np.arange(len(best)), best] = True
    return chosen & cells.mask


def _take(cells: Cells, flat: IntArray) -> Filled:
    chosen = np.zeros_like(cells.mask)
    chosen.reshape(-1)[flat] = True
    return Filled(chosen, np.zeros_like(chosen))
