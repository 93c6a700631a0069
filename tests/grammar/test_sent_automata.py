"""Automata that are sent to other processes."""

from __future__ import annotations

import pickle
from dataclasses import fields

import numpy as np
from small_automata import digits, literal


def test_what_comes_twice_is_one_object() -> None:
    automaton, other = digits([1, 2], 3, 9, [8]), literal([1, 2], 9, [8])
    first, again = (pickle.loads(pickle.dumps(automaton)) for _ in range(2))
    assert first is again
    for field in fields(automaton):
        assert np.array_equal(getattr(first, field.name), getattr(automaton, field.name))
    assert pickle.loads(pickle.dumps(other)) is not first
