"""The most probable way to fill a row so that it fits an automaton, in plain numpy.

The lattice of a row is its positions × the automaton's states. Every position has a weight for each
class of tokens: a mask the classes' own, a filled one nothing but its token's class. A path leads
from the constraint's state to any state from which the answer can be completed in the tokens that
are left behind the row (`open_states`).

- The tokens are those of the path with the largest sum of keys. Without sampling keys are logits,
  so it is the most probable path; when sampling they are perturbed by noise that a position keeps.
- `max_prob` is the probability of such a token given that the row fits, P(token here | a path),
  over all paths: where only one token fits it is 1. The ranking by entropy is of the same
  distribution.

This is the definition, one row at a time and in logarithms. `lopa.runner.fast_lattice` is what is
used on a host, `lopa.kernels.triton.lattice` on a GPU; both are tested against it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lopa.types import Automaton, BoolArray, Constraint, FloatArray, IntArray

Floats = npt.NDArray[np.float64]


class ClassScores(NamedTuple):
    """What a position's logits say of each class of tokens: [N, classes] each.

    Logits are less a constant of the position's own, which cancels out.
    """

    key: FloatArray  # largest key of its tokens
    token: IntArray  # which has it; of equals the lowest
    logit: FloatArray  # of that token
    mass: FloatArray  # log of the sum of exp(logit)
    mean: FloatArray | None  # mean logit of its tokens, weighted by exp(logit); for the entropy

    def at(self, where: slice) -> ClassScores:
        """Of some positions."""
        mean = None if self.mean is None else self.mean[where]
        key, token = self.key[where], self.token[where]
        return ClassScores(key, token, self.logit[where], self.mass[where], mean)


class Filling(NamedTuple):
    """What a row's masks are to be filled with, from left to right: [N] each."""

    token: IntArray
    max_prob: FloatArray
    neg_entropy: FloatArray | None


def open_states(automaton: Automaton, left: IntArray) -> BoolArray:
    """[positions, states] whether a state may stand before a position with so many tokens left.

    From any such state the answer can be completed with masks alone. left: [positions]
    """
    found: BoolArray = automaton.distance[None, :] <= np.maximum(left, 0)[:, None]
    return found


def fill_row(
    constraint: Constraint,
    classes: IntArray,  # [n] from constraint.start on: the class of a filled token, -1 at a mask
    scores: ClassScores,  # of the masks
) -> Filling:
    automaton = constraint.automaton
    following = automaton.next
    states, n = len(following), len(classes)
    left = constraint.limit - constraint.start - np.arange(n + 1)
    may_be = open_states(automaton, left)
    sources, moves = np.nonzero(following >= 0)
    targets = following[sources, moves]
    is_mask = classes < 0
    key, mass = (_weights(x, classes) for x in (scores.key, scores.mass))

    # Sums over all paths from the left (before), over all paths and the best of them to the right.
    before, behind, best = np.full((3, n + 1, states), -np.inf)
    before[0, constraint.state] = 0.0
    behind[n, may_be[n]] = best[n, may_be[n]] = 0.0
    for i in range(n):
        np.logaddexp.at(before[i + 1], targets, before[i, sources] + mass[i, moves])
        before[i + 1, ~may_be[i + 1]] = -np.inf
    for i in range(n - 1, -1, -1):
        np.logaddexp.at(behind[i], sources, mass[i, moves] + behind[i + 1, targets])
        np.maximum.at(best[i], sources, key[i, moves] + best[i + 1, targets])
        behind[i, ~may_be[i]] = best[i, ~may_be[i]] = -np.inf

    token, max_prob, neg_entropy = [], [], []
    state, mask = constraint.state, 0
    for i in range(n):
        allowed = following[state] >= 0
        onward = np.where(allowed, key[i] + best[i + 1, following[state]], -np.inf)
        if not is_mask[i]:
            state = int(following[state, classes[i]])
            continue
        if onward.max() == -np.inf:
            raise RuntimeError("no way to fill the row fits")
        # Of equals the lowest token
        ties = np.flatnonzero((onward == onward.max()) | np.isnan(onward))
        move = int(ties[scores.token[mask, ties].argmin()])
        # Of each class, the paths that have any one of its tokens here, by that token's logit
        total = _sum(before[i] + behind[i])
        around = np.full(following.shape[1], -np.inf)
        np.logaddexp.at(around, moves, before[i, sources] + behind[i + 1, targets])
        token.append(int(scores.token[mask, move]))
        max_prob.append(np.exp(np.minimum(0.0, scores.logit[mask, move] + around[move] - total)))
        if scores.mean is not None:
            chance = np.exp(np.minimum(0.0, mass[i] + around - total))
            some = chance > 0
            logs = (scores.mean[mask] + around - total)[some]
            neg_entropy.append(float(np.minimum(0.0, (chance[some] * logs).sum())))
        state = int(following[state, move])
        mask += 1
    return Filling(
        np.array(token, np.int64),
        np.array(max_prob, np.float64),
        None if scores.mean is None else np.array(neg_entropy, np.float64),
    )


def _weights(values: FloatArray, classes: IntArray) -> Floats:
    """[n, classes] of all positions; values: [masks, classes] of the masks."""
    weights = np.full((len(classes), values.shape[1]), -np.inf)
    is_mask = classes < 0
    weights[is_mask] = values
    filled = np.flatnonzero(~is_mask)
    weights[filled, classes[filled]] = 0.0
    return weights


def _sum(logs: Floats) -> float:
    return float(np.logaddexp.reduce(logs))
