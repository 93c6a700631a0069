"""Random ways through automata."""

from __future__ import annotations

from random import Random

import numpy as np

from lopa.grammar.automaton import Dfa
from lopa.grammar.token_automaton import TokenAutomaton, distances


def walk(dfa: Dfa, rng: Random, long: int = 40) -> str:
    """A text of it. After `long` characters it takes the shortest way to an end."""
    left = distances(dfa.next, dfa.accepting).tolist()
    state, text = 0, ""
    while True:
        moves = list(dfa.moves(state))
        if dfa.accepting[state] and (not moves or len(text) >= long or rng.random() < 0.3):
            return text
        if len(text) >= long:
            moves = [move for move in moves if left[move[1]] < left[state]]
        chars, state = rng.choice(moves)
        low, high = rng.choice(chars)
        text += chr(rng.choice([low, high, rng.randint(low, high)]))


def walk_tokens(automaton: TokenAutomaton, rng: Random, budget: int) -> list[int]:
    """Tokens of an answer of at most `budget` tokens."""
    state, tokens = automaton.start, []
    while not automaton.accepting[state] or rng.random() < 0.7:
        left = budget - len(tokens) - 1
        row = automaton.next[state, :-1]
        allowed = np.nonzero((row >= 0) & (automaton.distance[row] <= left))[0]
        if not len(allowed):
            break
        chosen = rng.choice(allowed.tolist())
        tokens.append(rng.choice(np.nonzero(automaton.class_of == chosen)[0].tolist()))
        state = int(row[chosen])
    assert automaton.accepting[state]
    return tokens
