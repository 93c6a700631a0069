"""The automaton over tokens: distances and steps."""

from __future__ import annotations

import json
from itertools import product
from random import Random

import jsonschema
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up_schemas import made_up
from walks import walk_tokens

from lopa.errors import ConfigError
from lopa.grammar import regex
from lopa.grammar.json_schema import compile_schema
from lopa.grammar.token_automaton import Spelling, TokenAutomaton, distances, lift
from lopa.grammar.utf8 import to_bytes


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


def test_tokens_lead_where_their_bytes_do() -> None:
    """All answers of up to four tokens, against the automaton over bytes."""
    vocabulary = [
        b"a",
        b"b",
        b"ab",
        b"ba",
        b" ",
        b" a",
        None,
        b"\xc3",
        b"\xa9",
        "é".encode(),
        b"",
        b"a",
    ]
    eos, mask = 6, 11
    for pattern in ("(ab)*", "a+ ?b", "é+b|a*", "[^b]{2,3}", "(a|b)*abb", " ab"):
        dfa = to_bytes(regex.fullmatch(pattern))
        automaton = lift(dfa, Spelling.of(vocabulary), eos_ids=[eos], forbidden=[mask])
        assert automaton.class_of[mask] == automaton.class_of[10] == 0
        for tokens in (t for n in range(5) for t in product(range(len(vocabulary)), repeat=n)):
            state = automaton.advance(automaton.start, tokens)
            accepts = state >= 0 and bool(automaton.accepting[state])
            text, *rest = split(tokens, eos)
            usable = not {10, mask} & {*tokens} and all(token == eos for token in rest)
            spelt = b"".join(vocabulary[t] or b"" for t in text)
            assert accepts == (usable and dfa.accepts(spelt)), (pattern, tokens)
        assert (automaton.next[automaton.end, :-1] == -1).all()
        assert (automaton.distance >= 0).all()


def split(tokens: tuple[int, ...], eos: int) -> tuple[tuple[int, ...], *tuple[int, ...]]:
    end = tokens.index(eos) if eos in tokens else len(tokens)
    return tokens[:end], *tokens[end:]


def test_the_first_token_may_be_spelt_otherwise() -> None:
    later = [b"a", b" a", b" "]
    first = [b"a", b"a", b""]
    dfa = to_bytes(regex.fullmatch("a a"))
    automaton = lift(dfa, Spelling.of(later), Spelling.of(first), eos_ids=[])
    accepted = {
        tokens
        for n in range(5)
        for tokens in product(range(3), repeat=n)
        if (state := automaton.advance(automaton.start, tokens)) >= 0 and automaton.accepting[state]
    }
    assert accepted == {(0, 1), (1, 1), (0, 2, 0), (1, 2, 0), (2, 0, 1), (2, 0, 2, 0)}
    assert automaton.min_tokens == 2


def test_classes_are_few_and_states_are_all_of_use() -> None:
    automaton = lift(
        to_bytes(regex.fullmatch("[ab]x")),
        Spelling.of([b"a", b"b", b"c", b"x", b"ax", b"bx"]),
        eos_ids=[],
    )
    assert automaton.classes == 5  # none, a or b, x, ax or bx, EOS
    assert automaton.states == 4
    assert automaton.class_of.tolist() == [1, 1, 0, 2, 3, 3]


def test_tokens_that_cannot_spell_it_are_refused() -> None:
    with pytest.raises(ConfigError, match="cannot spell"):
        lift(to_bytes(regex.fullmatch("ab")), Spelling.of([b"a", b"c"]), eos_ids=[])


def test_what_only_leads_to_a_dead_end_is_not_allowed() -> None:
    automaton = lift(
        to_bytes(regex.fullmatch("ab|cd")), Spelling.of([b"a", b"b", b"c"]), eos_ids=[]
    )
    assert automaton.class_of[2] == 0
    assert automaton.advance(automaton.start, [0, 1]) >= 0


@pytest.mark.parametrize("start", range(0, 60, 20))
def test_answers_of_made_up_schemas_are_valid(start: int) -> None:
    bytes_and_more = [bytes([i]) for i in range(256)] + [
        b'{"',
        b'": ',
        b', "',
        b"null",
        b'"]',
        b"12",
    ]
    for seed in range(start, start + 20):
        made = made_up(seed)
        dfa = to_bytes(compile_schema(json.dumps(made.schema)))
        automaton = lift(dfa, Spelling.of(bytes_and_more), eos_ids=[])
        fits = jsonschema.Draft202012Validator(made.schema)
        rng = Random(seed)
        for budget in (automaton.min_tokens, automaton.min_tokens + 1, 60, 60, 60):
            tokens = walk_tokens(automaton, rng, max(budget, automaton.min_tokens))
            text = b"".join(bytes_and_more[token] for token in tokens).decode()
            fits.validate(json.loads(text))
