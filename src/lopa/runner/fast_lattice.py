"""What `lopa.runner.lattice` defines, for many rows at once on a host.

From the right the sums over all paths, in logarithms, and with them the chance of each transition
given the state before it. From the left the chance of each state, which needs no logarithms: it is
a chain of these. So nothing is too small, however little the likely tokens fit.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from lopa.runner.class_scores import ScoreColumns
from lopa.runner.lattice import Filling, open_states
from lopa.runner.transitions import transitions_of
from lopa.types import Constraint, IntArray

Floats = npt.NDArray[np.float64]


def fill_rows(constraint: Constraint, classes: IntArray, scores: ScoreColumns) -> Filling:
    """The fillings of rows of equal length, one behind the other.

    classes: [R, n] from constraint.start on: the class of a filled token, -1 at a mask
    scores: on the host, of the masks, row by row
    """
    with np.errstate(divide="ignore", invalid="ignore", under="ignore"):
        return _Lattice(constraint, classes, scores.in_fp64()).filling()


class _Lattice:
    def __init__(self, constraint: Constraint, classes: IntArray, scores: ScoreColumns) -> None:
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
        # Relative to the largest class, exp of a mass is never 0.
        top = scores.mass[1:].amax(dim=0)
        summed = segments.sum(segments.padded((scores.mass - top).exp(), 0.0)).log() + top
        largest = segments.amax(segments.padded(scores.key))
        # [n, 2, R, bundles] logs of the masses, and keys
        self.weights = np.stack([self._weights(summed), self._weights(largest)], axis=1)
        self._index_transitions()

    def _weights(self, of_masks: torch.Tensor) -> Floats:
        """[n, R, bundles] logs: at a filled token 0 for the bundles that hold its class."""
        weights = np.full((self.n, self.rows, len(of_masks)), -np.inf)
        weights[self.is_mask] = of_masks.T.numpy()[self.mask_of]
        held = self.transitions.members.T[self.classes[~self.is_mask]] > 0
        weights[~self.is_mask] = np.where(held, 0.0, -np.inf)
        return weights

    def _index_transitions(self) -> None:
        """Flat indices of the transitions of all rows, those of a state behind each other."""
        edges, states = self.transitions.by_source, self.transitions.states
        count, bundles = len(edges.source), len(self.transitions.bundles)
        both = 2 * self.rows  # sums, then keys
        row = np.repeat(np.arange(both), count)
        self.source = row * states + np.tile(edges.source, both)
        self.target = row * states + np.tile(edges.target, both)
        self.bundle = row * bundles + np.tile(edges.bundle, both)
        self.half = self.rows * count
        self.first = np.flatnonzero(np.diff(self.source, prepend=-1))  # of each state's
        self.present = self.source[self.first]  # the states that have any
        lengths = np.diff(self.first, append=len(self.source))
        self.half_states = len(lengths) // 2
        self.group = np.repeat(np.arange(self.half_states), lengths[: self.half_states])

    def filling(self) -> Filling:
        if self.scores.mass.isnan().any():  # as the logits are: whoever reads this says so
            nothing = np.full(len(self.mask_of), np.nan)
            return Filling(np.zeros(len(nothing), np.int64), nothing, nothing)
        behind, best, chances = self._from_the_right()
        before, by_bundle = self._from_the_left(chances)
        # Of each mask, in the order of [n, R]
        mask, move = self.mask_of, self._moves(best)[self.is_mask]
        token = self.scores.token.numpy()[move, mask]
        logit = self.scores.logit.numpy()[move, mask]
        # A state's chance, times that of the token where it is the one that follows
        reached = self.constraint.automaton.next.T[move]  # [masks, states]
        onward = np.take_along_axis(behind[1:][self.is_mask], reached, axis=1)
        ratio = np.exp(np.minimum(0.0, logit[:, None] + onward - behind[:-1][self.is_mask]))
        here = before[self.is_mask]
        chance = np.where((reached >= 0) & (here > 0), here * ratio, 0.0).sum(axis=1)
        in_rows = mask.argsort()
        neg_entropy = None
        if self.scores.mean is not None:
            neg_entropy = self._neg_entropy(by_bundle[self.is_mask])[in_rows]
        return Filling(token[in_rows], np.minimum(1.0, chance)[in_rows], neg_entropy)

    def _from_the_right(self) -> tuple[Floats, Floats, list[Floats]]:
        """[n + 1, R, states] log sums over the paths from a state on; the best sum of keys; and at
        each position the chance of each transition given its source."""
        values = np.full((self.n + 1, 2, self.rows, self.transitions.states), -np.inf)
        values[-1][..., self.may_be[-1]] = 0.0
        chances, half, half_states = [], self.half, self.half_states
        for i in range(self.n - 1, -1, -1):
            weight = values[i + 1].take(self.target) + self.weights[i].take(self.bundle)
            found = np.maximum.reduceat(weight, self.first)
            top = found[:half_states]  # of the sums; of the keys it is what is looked for
            dead = top == -np.inf
            weight = np.exp(weight[:half] - np.where(dead, 0.0, top).take(self.group))
            total = np.add.reduceat(weight, self.first[:half_states])
            top += np.log(total)
            total[dead] = 1.0
            chances.append(weight / total.take(self.group))
            values[i].reshape(-1)[self.present] = found
            values[i][..., ~self.may_be[i]] = -np.inf
        behind, best = values[:, 0], values[:, 1]
        return behind, best, chances[::-1]

    def _from_the_left(self, chances: list[Floats]) -> tuple[Floats, Floats]:
        """[n, R, states] the chance of a state before each position, and [n, R, bundles] that a
        transition with a bundle follows."""
        states, bundles = self.transitions.states, len(self.transitions.bundles)
        before = np.zeros((self.n + 1, self.rows, states))
        before[0, :, self.constraint.state] = 1.0
        by_bundle = np.empty((self.n, self.rows, bundles))
        source, target, bundle = (x[: self.half] for x in (self.source, self.target, self.bundle))
        for i, chance in enumerate(chances):
            taken = before[i].take(source) * chance
            following = np.bincount(target, taken, self.rows * states)
            before[i + 1] = following.reshape(self.rows, states)
            if self.scores.mean is not None:
                used = np.bincount(bundle, taken, self.rows * bundles)
                by_bundle[i] = used.reshape(self.rows, bundles)
        return before[:-1], by_bundle

    def _moves(self, best: Floats) -> IntArray:
        """[n, R] the classes of the best path."""
        following = self.constraint.automaton.next
        keys, tokens = self.scores.key.T.numpy(), self.scores.token.T.numpy()
        number = np.zeros((self.n, self.rows), np.int64)
        number[self.is_mask] = self.mask_of
        state = np.full(self.rows, self.constraint.state)
        moves = self.classes.copy()
        for i in range(self.n):
            here = self.is_mask[i].nonzero()[0]
            if len(here):
                reached = following[state[here]]  # [masks, classes]
                onward = best[i + 1][here[:, None], reached] + keys[number[i, here]]
                onward[reached < 0] = -np.inf
                # Of equals the lowest token
                ties = onward == onward.max(axis=1, keepdims=True)
                moves[i, here] = np.where(ties, tokens[number[i, here]], _NO_TOKEN).argmin(axis=1)
            state = following[state, moves[i]]
        return moves

    def _neg_entropy(self, used: Floats) -> Floats:
        """[masks] of the distribution of tokens. used: [masks, bundles] chance of each bundle"""
        assert self.scores.mean is not None
        bundle, member = self.transitions.members.nonzero()
        mass = self.scores.mass.T.numpy()[self.mask_of]  # [masks, classes]
        share = np.exp(mass[:, member] - self.weights[:, 0][self.is_mask][:, bundle])
        chance = np.zeros_like(mass)
        for index, number in enumerate(member.tolist()):
            chance[:, number] += used[:, bundle[index]] * share[:, index]
        mean = self.scores.mean.T.numpy()[self.mask_of]
        logs = np.where(chance > 0, mean - mass + np.log(chance), 0.0)
        found: Floats = np.minimum(0.0, (chance * logs).sum(axis=1))
        return found


_NO_TOKEN = np.iinfo(np.int64).max
