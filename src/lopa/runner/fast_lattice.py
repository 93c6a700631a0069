"""What `lopa.runner.lattice` defines, for many rows at once on a host.

Sums are of plain numbers, scaled to 1 at every position: no logarithm in a step. What is too small
for that has no part in the result, unless nothing else is left; then the plain lattice computes it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from lopa.runner.class_scores import ScoreColumns
from lopa.runner.lattice import Filling, fill_row, open_states
from lopa.runner.transitions import Edges, Transitions, transitions_of
from lopa.types import Constraint, IntArray

Floats = npt.NDArray[np.float64]

# Sums and scales that are larger than this are exact to the precision of fp64: what was lost is
# less than 1e-300.
_EXACT = 1e-150


def fill_rows(constraint: Constraint, classes: IntArray, scores: ScoreColumns) -> Filling:
    """The fillings of rows of equal length, one behind the other.

    classes: [R, n] from constraint.start on: the class of a filled token, -1 at a mask
    scores: on the host, of the masks, row by row
    """
    with np.errstate(divide="ignore", invalid="ignore", under="ignore"):
        found = _Lattice(constraint, classes, scores).filling()
    if found is not None:
        return found
    plain = scores.transposed()
    fillings, end = [], 0
    for row in classes:
        here = slice(end, end := end + int((row < 0).sum()))
        fillings.append(fill_row(constraint, row, plain.at(here)))
    token, max_prob = (np.concatenate(x) for x in zip(*(f[:2] for f in fillings), strict=True))
    entropies = [f.neg_entropy for f in fillings if f.neg_entropy is not None]
    return Filling(token, max_prob, np.concatenate(entropies) if entropies else None)


class _Lattice:
    def __init__(self, constraint: Constraint, classes: IntArray, scores: ScoreColumns) -> None:
        scores = scores.in_fp64()
        self.constraint, self.scores = constraint, scores
        self.rows, self.n = classes.shape
        self.transitions = transitions_of(constraint.automaton)
        left = constraint.limit - constraint.start - np.arange(self.n + 1)
        self.may_be = open_states(constraint.automaton, left)
        self.is_mask = (classes < 0).T  # [n, R]
        self.classes = classes.T
        # Where the masks' scores, which are row by row, belong in [n, R]
        number = np.zeros(classes.shape, np.int64)
        number[classes < 0] = np.arange((classes < 0).sum())
        self.mask_of = number.T[self.is_mask]  # in the order of [n, R]
        segments = self.transitions.segments
        # Masses less the largest of each mask, so that the sums are not too small
        self.shift = scores.mass[1:].amax(dim=0)
        self.chance = (scores.mass - self.shift).clamp(max=0.0).exp()
        summed = segments.sum(segments.padded(self.chance, 0.0)).T
        largest = segments.amax(segments.padded(scores.key)).T
        self.mass = self._weights(summed, 0.0, 1.0)
        self.key = self._weights(largest, -np.inf, 0.0)

    def _weights(self, of_masks: torch.Tensor, without: float, one: float) -> Floats:
        """[n, R, bundles]; `one` for the bundles that hold a filled token's class"""
        weights = np.full((self.n, self.rows, of_masks.shape[1]), without)
        weights[self.is_mask] = of_masks.numpy()[self.mask_of]
        held = self.transitions.members.T[self.classes[~self.is_mask]] > 0
        weights[~self.is_mask] = np.where(held, one, without)
        return weights

    def filling(self) -> Filling | None:
        """None: the numbers are too small."""
        if self.shift.isnan().any():  # as the logits are: whoever reads this says so
            nothing = np.full(len(self.mask_of), np.nan)
            return Filling(np.zeros(len(nothing), np.int64), nothing, nothing)
        before, scale = self._before()
        behind, best, least = self._behind()
        # Of each mask, here and below in the order of [n, R]: the sum over all paths
        total = ((before[1:] * behind[1:]).sum(axis=2) * scale)[self.is_mask]
        if not min(total.min(initial=1.0), scale.min(initial=1.0), least) > _EXACT:
            return None
        move = self._moves(best)[self.is_mask]
        reached = self.constraint.automaton.next.T[move]  # [masks, states]
        onward = np.take_along_axis(behind[1:][self.is_mask], reached, axis=1)
        around = (before[:-1][self.is_mask] * np.where(reached >= 0, onward, 0.0)).sum(axis=1)
        mask = self.mask_of
        logit = self.scores.logit.numpy()[move, mask] - self.shift.numpy()[mask]
        max_prob = np.minimum(1.0, np.exp(logit) * around / total)
        token = self.scores.token.numpy()[move, mask]
        in_rows = mask.argsort()
        neg_entropy = None
        if self.scores.mean is not None:
            neg_entropy = self._neg_entropy(before, behind, total)[in_rows]
        return Filling(token[in_rows], max_prob[in_rows], neg_entropy)

    def _before(self) -> tuple[Floats, Floats]:
        """[n + 1, R, states] sums over the paths to a state, the largest of a position 1; and by
        what each was divided: [n, R]"""
        n, rows, states = self.n, self.rows, self.transitions.states
        step = _Step(self.transitions.by_target, "target", rows, self.transitions)
        before = np.zeros((n + 1, rows, states))
        before[0, :, self.constraint.state] = 1.0
        scale = np.ones((n, rows))
        for i in range(n):
            weight = before[i].take(step.other) * self.mass[i].take(step.bundle)
            to = before[i + 1]
            to.reshape(-1)[step.present] = np.add.reduceat(weight, step.begin)
            to *= self.may_be[i + 1]
            scale[i] = np.maximum.reduce(to, axis=1)
            to /= scale[i][:, None]
        return before, scale

    def _behind(self) -> tuple[Floats, Floats, float]:
        """[n + 1, R, states] sums over the paths from a state on, scaled as well; the best sum of
        keys; and the least of what was divided by."""
        n, rows, states = self.n, self.rows, self.transitions.states
        step = _Step(self.transitions.by_source, "source", rows, self.transitions)
        behind, best = np.zeros((n + 1, rows, states)), np.full((n + 1, rows, states), -np.inf)
        least = 1.0
        behind[n] = self.may_be[n]
        best[n][:, self.may_be[n]] = 0.0
        for i in range(n - 1, -1, -1):
            weight = behind[i + 1].take(step.other) * self.mass[i].take(step.bundle)
            to = behind[i]
            to.reshape(-1)[step.present] = np.add.reduceat(weight, step.begin)
            to *= self.may_be[i]
            scale = np.maximum.reduce(to, axis=1)
            to /= scale[:, None]
            least = min(least, float(scale.min()))
            sums = best[i + 1].take(step.other) + self.key[i].take(step.bundle)
            best[i].reshape(-1)[step.present] = np.maximum.reduceat(sums, step.begin)
            best[i][:, ~self.may_be[i]] = -np.inf
        return behind, best, least

    def _moves(self, best: Floats) -> IntArray:
        """[n, R] the classes of the best path."""
        following = self.constraint.automaton.next
        keys, tokens = self.scores.key.T.numpy(), self.scores.token.T.numpy()
        number = np.zeros((self.n, self.rows), np.int64)
        number[self.is_mask] = self.mask_of
        state = np.full(self.rows, self.constraint.state)
        moves = self.classes.copy()
        for i in range(self.n):
            here = self.is_mask[i]
            if here.any():
                reached = following[state[here]]  # [masks, classes]
                onward = np.take_along_axis(best[i + 1][here], reached, axis=1)
                onward = np.where(reached >= 0, onward + keys[number[i, here]], -np.inf)
                top = onward.max(axis=1, keepdims=True)
                # Of equals the lowest token
                ties = (onward == top) | np.isnan(onward)
                moves[i, here] = np.where(ties, tokens[number[i, here]], _NO_TOKEN).argmin(axis=1)
            state = following[state, moves[i]]
        return moves

    def _neg_entropy(self, before: Floats, behind: Floats, total: Floats) -> Floats:
        """[masks] of the distribution of tokens given that the row fits."""
        assert self.scores.mean is not None
        rows, transitions = self.rows, self.transitions
        step = _Step(transitions.by_source, "source", rows, transitions)
        bundles = len(transitions.bundles)
        own = np.repeat(np.arange(rows) * transitions.states, len(transitions.by_source.source))
        source = own + np.tile(transitions.by_source.source, rows)
        around = np.empty((self.n, rows, bundles))
        for i in range(self.n):
            weight = before[i].take(source) * behind[i + 1].take(step.other)
            around[i] = np.bincount(step.bundle, weight, rows * bundles).reshape(rows, bundles)
        # Paths around each class, by which its mass is multiplied
        factor = around[self.is_mask] @ transitions.members / total[:, None]
        chance = self.chance.T.numpy()[self.mask_of] * factor
        mean = self.scores.mean.T.numpy()[self.mask_of] - self.shift.numpy()[self.mask_of, None]
        logs = np.where(chance > 0, mean + np.log(factor), 0.0)
        found: Floats = np.minimum(0.0, (chance * logs).sum(axis=1))
        return found


_NO_TOKEN = np.iinfo(np.int64).max


class _Step:
    """Indices of one step over all transitions of all rows, in flat arrays."""

    def __init__(self, edges: Edges, by: str, rows: int, transitions: Transitions) -> None:
        own, other = edges.source, edges.target
        if by == "target":
            own, other = other, own
        count, states, bundles = len(own), transitions.states, len(transitions.bundles)
        row = np.repeat(np.arange(rows), count)
        self.other: IntArray = row * states + np.tile(other, rows)
        self.bundle: IntArray = row * bundles + np.tile(edges.bundle, rows)
        first = np.flatnonzero(np.diff(own, prepend=-1))  # of each state that has any
        self.begin = (np.arange(rows)[:, None] * count + first).reshape(-1)
        self.present = (np.arange(rows)[:, None] * states + own[first]).reshape(-1)
