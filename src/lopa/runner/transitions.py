"""An automaton as the lattice reads it: few transitions, each with a bundle of classes.

All classes that lead from one state to the same state are a bundle, and many states have the same
ones (what may stand inside a string, say). So a position's weights are summed up once for each
bundle, and a step through the lattice is over pairs of states, not over classes.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch

from lopa.runner.segments import Segments
from lopa.types import Automaton, BoolArray, IntArray


class Edges(NamedTuple):
    """Transitions in some order: [T] each."""

    source: IntArray
    target: IntArray
    bundle: IntArray


class Transitions:
    def __init__(self, automaton: Automaton) -> None:
        following = automaton.next
        self.states, self.classes = following.shape
        source, move = np.nonzero(following >= 0)
        target = following[source, move].astype(np.int64)
        order = np.lexsort((move, target, source))
        source, move, target = source[order], move[order], target[order]
        first = np.flatnonzero(np.diff(source * self.states + target, prepend=-1))
        known: dict[bytes, int] = {}
        bundle = np.empty(len(first), np.int64)
        self.bundles: list[IntArray] = []  # classes of each
        for index, classes in enumerate(np.split(move, first[1:])):
            content = classes.tobytes()
            if content not in known:
                known[content] = len(self.bundles)
                self.bundles.append(classes)
            bundle[index] = known[content]
        self.by_source = Edges(source[first], target[first], bundle)

    @cached_property
    def members(self) -> BoolArray:
        """[bundles, classes] whether a bundle has a class."""
        found = np.zeros((len(self.bundles), self.classes), np.bool_)
        for line, classes in zip(found, self.bundles, strict=True):
            line[classes] = True
        return found

    @cached_property
    def segments(self) -> Segments:
        """The classes of each bundle, on the host."""
        return Segments(self.bundles, self.classes, torch.device("cpu"))


_made: WeakKeyDictionary[Automaton, Transitions] = WeakKeyDictionary()


def transitions_of(automaton: Automaton) -> Transitions:
    """Made once for an automaton."""
    found = _made.get(automaton)
    if found is None:
        found = _made[automaton] = Transitions(automaton)
    return found
