"""Fill rules: which masks of a window are fixed in a round, and which filled tokens are replaced.

A rule sees a row's active blocks as arrays of shape [blocks, block size] and returns which cells to
fix and which of those it had to force: these did not pass a test but had to be made to get on.
Every rule is a plain function of its arguments; `FillRule` is the one of a configuration.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from lopa.config import DecodeConfig
from lopa.types import BoolArray, FillKind, FloatArray, IntArray

_SCHEDULE_END = 1e-3  # Dream's eps: the timestep that its schedule ends on


class Cells(NamedTuple):
    """A row's active blocks: [blocks, block size] each, `may_force` [blocks]."""

    mask: BoolArray
    max_prob: FloatArray
    ranking: FloatArray
    may_force: BoolArray
    fresh: bool = False  # the round recomputes everything, as Frame says
    # With editing: filled cells where another token is predicted, and its probability.
    doubted: BoolArray | None = None
    other_prob: FloatArray | None = None


class Filled(NamedTuple):
    """[blocks, block size] each."""

    chosen: BoolArray  # masks to fix
    forced: BoolArray  # a part of chosen
    edited: BoolArray | None = None  # filled cells to be replaced


@dataclass(frozen=True, slots=True)
class FillRule:
    """The rule that a configuration asks for."""

    config: DecodeConfig
    shift: bool  # the model's raw row p − 1 predicts position p

    def __call__(self, cells: Cells, step: int) -> Filled:
        """step: how many rounds the first block has had."""
        filled = self.fills(cells, step)
        if cells.doubted is None or cells.other_prob is None:
            return filled
        assert self.config.edit_threshold is not None
        sure = passes(cells.other_prob, self.config.edit_threshold)
        return filled._replace(edited=cells.doubted & sure)

    def fills(self, cells: Cells, step: int) -> Filled:
        """Without editing. In a pipeline also of several rows at once: [rows, blocks, size]."""
        config = self.config
        if config.window == "pipeline":
            quotas = self._quotas(cells.mask.shape[-2], step)
            if config.order == "sequential":
                return first_count(cells, 1 if quotas is None else int(quotas[0]))
            return above_threshold(cells, config.threshold, quotas)
        if cells.fresh and self.shift and cells.mask[0, 0]:
            # With shifted rows a cached window lacks the row that predicts its first position, so
            # Fast-dLLM on Dream fills that position, and nothing else, from the full forward.
            return leftmost(cells)
        if config.factor is not None:
            return by_factor(cells, config.factor)
        if config.steps is not None:
            steps = config.steps // config.blocks
            if self.shift:  # Dream's schedule counts the masks there are now
                count = schedule_count(int(cells.mask.sum()), step, steps)
            else:  # LLaDA's shares out those that the block began with
                count = block_quota(cells.mask.size, step, steps)
            return best_count(cells, count)
        if config.window == "blocks":
            return best_and_threshold(cells, config.threshold)
        return above_threshold(cells, config.threshold)

    def _quotas(self, blocks: int, step: int) -> IntArray | None:
        """[blocks] least fills of each block that has to get on; None: one.

        The schedule of a block begins when it is the first.
        """
        config = self.config
        steps, size = config.block_steps, config.block_size
        if steps is None:
            return None if config.quota == 1 else np.full(blocks, config.quota)
        quotas = np.full(blocks, block_quota(size, 0, steps))
        quotas[0] = block_quota(size, step, steps)
        return quotas

    @property
    def kind(self) -> FillKind:
        """What the record says of its fills, forced ones aside."""
        counts = self.config.steps is not None and self.config.window != "pipeline"
        return "count" if counts else "threshold"


def passes(max_prob: FloatArray, threshold: float) -> BoolArray:
    """Above the threshold, which is rounded to fp32 as in the published loops."""
    passed: BoolArray = max_prob > float(np.float32(threshold))
    return passed


def above_threshold(cells: Cells, threshold: float, quotas: IntArray | None = None) -> Filled:
    """D2F: every mask above the threshold; a fully activated block without one forces its best.

    SDAR and LLaDA2: a block with fewer than its quota fills the quota's best instead.
    quotas: [blocks]; None is one each. Also of several rows at once: [rows, blocks, block size].
    """
    chosen = cells.mask & passes(cells.max_prob, threshold)
    if quotas is not None:
        return _best_if_fewer(cells, chosen, quotas)
    forced = np.zeros(chosen.shape, np.bool_)
    without = cells.may_force & ~np.logical_or.reduce(chosen, axis=-1)
    if np.count_nonzero(without):
        stuck = (without & cells.mask.any(axis=-1)).nonzero()  # the others are full
        best = np.where(cells.mask[stuck], cells.ranking[stuck], -math.inf).argmax(axis=-1)
        forced[(*stuck, best)] = True
        chosen |= forced
    return Filled(chosen, forced)


def _best_if_fewer(cells: Cells, passed: BoolArray, quotas: IntArray) -> Filled:
    """What passed; of a fully activated block with fewer than its quota, the quota's best."""
    order = np.where(cells.mask, -cells.ranking, math.inf).argsort(axis=-1, kind="stable")
    places = np.empty_like(order)  # of each cell in that order
    np.put_along_axis(places, order, np.arange(order.shape[-1]), axis=-1)
    fewer = cells.may_force & (passed.sum(axis=-1) < quotas)
    best = cells.mask & (places < quotas[:, None])
    chosen = np.where(fewer[..., None], best, passed)
    return Filled(chosen, chosen & ~passed)


def with_others(filled: Filled, others: BoolArray) -> Filled:
    """Fill other masks too, [blocks · block size]; a block that has one of them forces nothing."""
    added = others.reshape(filled.chosen.shape)
    forced = filled.forced & ~np.logical_or.reduce(added, axis=-1, keepdims=True)
    chosen = filled.chosen & ~filled.forced | forced | added
    return filled._replace(chosen=chosen, forced=forced)


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
