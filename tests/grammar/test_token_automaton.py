"""The automaton over tokens: distances and steps."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lopa.grammar.token_automaton import TokenAutomaton, distances


@given(st.data())
def test_distances_are_those_of_a_search(data: st.DataObject) -> None:
    states = data.draw(st.integers(1, 8))
    row = st.lists(st.integers(-1, states - 1), min_size=3, max_size=3)
    following = np.array(data.draw(st.lists(row, min_size=states, max_size=states)), np.int32)
    accepting = np.array(data.draw(st.lists(st.booleans(), min_size=states, max_size=states)))
    for state, found in enumerate(distances(following, accepting).tolist()):
        seen, edge, steps = {state}, [state], 0
        while edge and not any(accepting[s] for s in edge):
            edge = [t for s in edge for t in following[s].tolist() if t >= 0 and t not in seen]
            seen.update(edge)
            steps += 1
        assert found == (steps if edge else -1)


def test_it_advances_by_classes() -> None:
    automaton = TokenAutomaton(
        class_of=np.array([0, 1, 1, 2], np.int32),
        next=np.array([[-1, 1, -1], [-1, -1, 2], [-1, -1, 2]], np.int32),
        start=0,
        accepting=np.array([False, True, True]),
        distance=np.array([1, 0, 0], np.int32),
        end=2,
    )
    assert automaton.min_tokens == 1
    assert automaton.advance(0, [2, 3, 3]) == automaton.end
    assert automaton.advance(0, [1, 1]) == -1
    assert automaton.advance(0, [0]) == -1
