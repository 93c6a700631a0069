"""The texts of a pattern, spelt in the tokens of a model: an automaton over classes of tokens.

Tokens that lead from every state to the same state are one class, so what is computed for a
pattern depends on its size and not on the vocabulary's. `lift` makes it from an automaton over
bytes; the decoder looks for paths through it. Nothing here knows a tokenizer or a device.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lopa.types import BoolArray

StateArray = npt.NDArray[np.int32]

FORBIDDEN = 0  # the class of tokens that no state allows


@dataclass(frozen=True, eq=False)
class TokenAutomaton:
    """Deterministic, and every state of it can be finished: some tokens lead to an accepting one.

    The tokens that end an answer are a class of their own. From an accepting state they lead to
    `end`, which is accepting, and from `end` to `end`; nothing else leaves `end`.
    """

    class_of: StateArray  # [vocab] class of each token; the mask token is FORBIDDEN
    next: StateArray  # [states, classes]; -1: not allowed
    start: int
    accepting: BoolArray  # [states] the answer may end here
    distance: StateArray  # [states] fewest tokens from here to an accepting state
    end: int  # the state behind EOS

    @property
    def states(self) -> int:
        return len(self.next)

    @property
    def classes(self) -> int:
        return self.next.shape[1]

    @property
    def min_tokens(self) -> int:
        """Tokens of the shortest answer, without an EOS."""
        return int(self.distance[self.start])

    def advance(self, state: int, tokens: Iterable[int]) -> int:
        """The state that `tokens` lead to from `state`; -1: they are not allowed."""
        for token in tokens:
            if state < 0:
                break
            state = int(self.next[state, self.class_of[token]])
        return state


def distances(following: StateArray, accepting: BoolArray) -> StateArray:
    """[states] fewest steps from each state to an accepting one; -1: there is no way."""
    found = np.where(accepting, 0, -1).astype(np.int32)
    # A state is given its distance in the round in which one of its successors has one.
    sources, _ = np.nonzero(following >= 0)
    targets = following[following >= 0]
    edges = np.unique(np.stack([sources, targets]), axis=1)
    steps = 0
    while True:
        steps += 1
        reached = edges[0][found[edges[1]] == steps - 1]
        fresh = reached[found[reached] < 0]
        if not len(fresh):
            return found
        found[fresh] = steps
