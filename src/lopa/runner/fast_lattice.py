"""What `lopa.runner.lattice` defines, for many rows at once on a host.

From the right the sums over all paths, in logarithms, and with them the chance of each transition
given the state before it. From the left the chance of each state, which needs no logarithms: it is
a chain of these. So nothing is too small, however little the likely tokens fit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lopa.runner.class_scores import ScoreColumns
from lopa.runner.lattice import Filling, open_states
from lopa.runner.transitions import Transitions, transitions_of
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
        self.steps = self._steps()

    def _weights(self, of_masks: torch.Tensor) -> Floats:
        """[n, R, bundles] logs: at a filled token 0 for the bundles that hold its class."""
        weights = np.full((self.n, self.rows, len(of_masks)), -np.inf)
        weights[self.is_mask] = of_masks.T.numpy()[self.mask_of]
        held = self.transitions.members.T[self.classes[~self.is_mask]]
        weights[~self.is_mask] = np.where(held, 0.0, -np.inf)
        return weights

    def _steps(self) -> list[_Step]:
        """The transitions of each position that some row can reach from the left."""
        edges = self.transitions.by_source
        is_held = np.logical_or.reduce(self.weights[:, 0] > -np.inf, axis=1)  # [n, bundles]
        all_held: list[bool] = np.logical_and.reduce(is_held, axis=1).tolist()
        all_open: list[bool] = np.logical_and.reduce(self.may_be, axis=1).tolist()
        here = np.zeros(self.transitions.states, np.bool_)
        here[self.constraint.state] = True
        steps = []
        for i in range(self.n):
            live = here.take(edges.source)
            if not all_held[i]:
                live &= is_held[i].take(edges.bundle)
            if not all_open[i + 1]:
                live &= self.may_be[i + 1].take(edges.target)
            which = live.nonzero()[0]
            source, target, bundle = (x.take(which) for x in edges)
            steps.append(_Step(source, target, bundle, self.rows, self.transitions))
            here = np.zeros(len(here), np.bool_)
            here[target] = True
        return steps

    def filling(self) -> Filling:
        if self.scores.mass.isnan().any():  # as the logits are: whoever reads this says so
            nothing = np.full(len(self.mask_of), np.nan)
            return Filling(np.zeros(len(nothing), np.int64), nothing, nothing)
        best, chances = self._from_the_right()
        # Of each mask, in the order of [n, R]
        used = self._from_the_left(chances)[self.is_mask]
        mask, move = self.mask_of, self._moves(best)[self.is_mask]
        token = self.scores.token.numpy()[move, mask]
        logit = self.scores.logit.numpy()[move, mask]
        # The chance of each bundle that holds the token, times the token's share of it
        mass = self.weights[:, 0][self.is_mask]
        share = np.exp(np.minimum(0.0, logit[:, None] - mass))
        max_prob = (used * self.transitions.members.T[move] * share).sum(axis=1)
        in_rows = mask.argsort()
        neg_entropy = None
        if self.scores.mean is not None:
            neg_entropy = self._neg_entropy(used, mass)[in_rows]
        return Filling(token[in_rows], np.minimum(1.0, max_prob)[in_rows], neg_entropy)

    def _from_the_right(self) -> tuple[Floats, list[Floats]]:
        """[n + 1, R, states] the best sum of keys from a state on; and by position the chance of
        each transition given its source, by the log sums over all paths."""
        best = np.full((self.n + 1, self.rows, self.transitions.states), -np.inf)
        best[-1][:, self.may_be[-1]] = 0.0
        values = np.stack([best[-1], best[-1]])  # sums and keys, here
        chances = []
        for i in range(self.n - 1, -1, -1):
            step = self.steps[i]
            weight = values.take(step.target) + self.weights[i].take(step.bundle)
            found = np.maximum.reduceat(weight, step.first)
            top = found[: step.states]  # of the sums; of the keys it is what is looked for
            dead = top == -np.inf
            weight = np.exp(weight[: step.half] - np.where(dead, 0.0, top).take(step.group))
            total = np.add.reduceat(weight, step.first[: step.states])
            top += np.log(total)
            total[dead] = 1.0
            chances.append(weight / total.take(step.group))
            values = np.full(values.shape, -np.inf)
            values.reshape(-1)[step.present] = found
            best[i] = values[1]
        return best, chances[::-1]

    def _from_the_left(self, chances: list[Floats]) -> Floats:
        """[n, R, bundles] the chance that a transition with a bundle is taken."""
        states, bundles = self.transitions.states, len(self.transitions.bundles)
        here: Any = np.zeros((self.rows, states))
        here[:, self.constraint.state] = 1.0
        used = np.empty((self.n, self.rows * bundles))
        for i, (step, chance) in enumerate(zip(self.steps, chances, strict=True)):
            taken = here.take(step.source) * chance
            here = np.bincount(step.target[: step.half], taken, self.rows * states)
            used[i] = np.bincount(step.bundle[: step.half], taken, self.rows * bundles)
        return used.reshape(self.n, self.rows, bundles)

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

    def _neg_entropy(self, used: Floats, of_bundles: Floats) -> Floats:
        """[masks] of the distribution of tokens.

        used, of_bundles: [masks, bundles] chance of each bundle, and its log mass"""
        assert self.scores.mean is not None
        bundle, member = self.transitions.members.nonzero()
        mass = self.scores.mass.T.numpy()[self.mask_of]  # [masks, classes]
        share = np.exp(mass[:, member] - of_bundles[:, bundle])
        chance = np.zeros_like(mass)
        for index, number in enumerate(member.tolist()):
            chance[:, number] += used[:, bundle[index]] * share[:, index]
        mean = self.scores.mean.T.numpy()[self.mask_of]
        logs = np.where(chance > 0, mean - mass + np.log(chance), 0.0)
        found: Floats = np.minimum(0.0, (chance * logs).sum(axis=1))
        return found


class _Step:
    """Flat indices of some transitions of all rows, those of a state behind each other.

    Twice: for the sums, and for the keys."""

    def __init__(
        self,
        source: IntArray,
        target: IntArray,
        bundle: IntArray,
        rows: int,
        transitions: Transitions,
    ) -> None:
        row, count = np.arange(2 * rows)[:, None], len(source)
        begins = np.ones(count, np.bool_)
        np.not_equal(source[1:], source[:-1], out=begins[1:])
        first = begins.nonzero()[0]
        self.half, self.states = rows * count, rows * len(first)
        self.source = (row[:rows] * transitions.states + source).reshape(-1)  # of the sums
        self.target = (row * transitions.states + target).reshape(-1)
        self.bundle = (row * len(transitions.bundles) + bundle).reshape(-1)
        self.first = (row * count + first).reshape(-1)  # where the transitions of a state begin
        self.present = (row * transitions.states + source[first]).reshape(-1)  # the state
        own = begins.cumsum() - 1
        self.group = (row[:rows] * len(first) + own).reshape(-1)  # which of these states


_NO_TOKEN = np.iinfo(np.int64).max
