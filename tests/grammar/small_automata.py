"""Automata over a few tokens, written by hand: what answers have to fit in tests of decoding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from hypothesis import strategies as st

from lopa.grammar.token_automaton import TokenAutomaton, distances

Table = Sequence[Mapping[int, int]]  # by state: the state behind each token


def automaton_of(
    table: Table, accepting: Sequence[int], vocab: int, eos: Sequence[int], start: int = 0
) -> TokenAutomaton:
    """Without EOS tokens in the table: they are added. Every state can be finished."""
    end = len(table)
    steps = np.full((end + 1, vocab), -1, np.int64)
    for state, moves in enumerate(table):
        for token, to in moves.items():
            steps[state, token] = to
    for token in eos:
        steps[[*accepting, end], token] = end
    columns, class_of = np.unique(steps, axis=1, return_inverse=True)
    # The tokens that no state allows are class 0, whether there are any or not.
    used = np.flatnonzero((columns >= 0).any(axis=0))
    classes = np.zeros(columns.shape[1], np.int32)
    classes[used] = np.arange(1, len(used) + 1)
    following = np.full((end + 1, len(used) + 1), -1, np.int32)
    following[:, 1:] = columns[:, used]
    accepts = np.zeros(end + 1, np.bool_)
    accepts[[*accepting, end]] = True
    distance = distances(following, accepts)
    assert (distance >= 0).all()
    return TokenAutomaton(
        class_of=classes[class_of.reshape(-1)],
        next=following,
        start=start,
        accepting=accepts,
        distance=distance,
        end=end,
    )


def literal(tokens: Sequence[int], vocab: int, eos: Sequence[int]) -> TokenAutomaton:
    table = [{token: index + 1} for index, token in enumerate(tokens)]
    return automaton_of([*table, {}], [len(tokens)], vocab, eos)


def digits(allowed: Sequence[int], most: int, vocab: int, eos: Sequence[int]) -> TokenAutomaton:
    """One to `most` of the allowed tokens."""
    table = [dict.fromkeys(allowed, index + 1) for index in range(most)]
    return automaton_of([*table, {}], range(1, most + 1), vocab, eos)


def balanced(
    opening: int, closing: int, inside: Sequence[int], depth: int, vocab: int, eos: Sequence[int]
) -> TokenAutomaton:
    """Brackets up to a depth, other tokens between them."""
    table: list[dict[int, int]] = [{opening: 1}]
    for level in range(1, depth + 1):
        moves = dict.fromkeys(inside, level)
        moves[closing] = level - 1 if level > 1 else depth + 1
        if level < depth:
            moves[opening] = level + 1
        table.append(moves)
    return automaton_of([*table, {}], [depth + 1], vocab, eos)


def alternation(choices: Sequence[Sequence[int]], vocab: int, eos: Sequence[int]) -> TokenAutomaton:
    """One of several literals, of different lengths."""
    table: list[dict[int, int]] = [{}]
    accepting = []
    for choice in choices:
        state = 0
        for token in choice:
            if token not in table[state]:
                table[state][token] = len(table)
                table.append({})
            state = table[state][token]
        accepting.append(state)
    return automaton_of(table, accepting, vocab, eos)


@st.composite
def automata(draw: st.DrawFn, vocab: int, eos: int, most_states: int = 5) -> TokenAutomaton:
    """Any automaton of a few states, less the states that cannot be finished."""
    count = draw(st.integers(1, most_states))
    others = [token for token in range(vocab) if token != eos]
    moves = st.dictionaries(st.sampled_from(others), st.integers(0, count - 1), max_size=vocab)
    table = draw(st.lists(moves, min_size=count, max_size=count))
    accepting = draw(st.sets(st.integers(0, count - 1), min_size=1))
    finished = set(accepting)
    while more := {
        s for s, m in enumerate(table) if s not in finished and finished & {*m.values()}
    }:
        finished |= more
    start = draw(st.sampled_from(sorted(finished)))
    kept = {state: number for number, state in enumerate(sorted(finished))}
    trimmed = [{t: kept[to] for t, to in table[s].items() if to in kept} for s in sorted(kept)]
    ends = sorted(kept[state] for state in accepting)
    return automaton_of(trimmed, ends, vocab, [eos], kept[start])
