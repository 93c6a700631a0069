"""The lattice against all ways to fill a row, listed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from small_automata import alternation, automata, digits, literal

from lopa import DecodeConfig
from lopa.grammar.token_automaton import TokenAutomaton
from lopa.runner.class_scores import class_scores, perturbed
from lopa.runner.fast_lattice import fill_rows
from lopa.runner.lattice import Filling, fill_row
from lopa.runner.statistics import keep_top
from lopa.types import Constraint

VOCAB, EOS = 6, 5
MASK = VOCAB  # its logit is one more column


def ways(constraint: Constraint, row: list[int]) -> Iterator[tuple[int, ...]]:
    """All tokens in place of the row's masks that can be completed, by trying them."""
    automaton: Any = constraint.automaton
    if not _completable(automaton, constraint.state, constraint.limit - constraint.start):
        return
    choices = [range(VOCAB) if token == MASK else [token] for token in row]
    for tokens in itertools.product(*choices):
        state, position = constraint.state, constraint.start
        for token in tokens:
            state = automaton.advance(state, [token])
            position += 1
            if state < 0 or (position >= constraint.limit and not automaton.accepting[state]):
                break
        else:
            if _completable(automaton, state, constraint.limit - position):
                yield tokens


def _completable(automaton: TokenAutomaton, state: int, left: int) -> bool:
    """By search, not by the automaton's distances."""
    reached = {state}
    for _ in range(max(0, left)):
        reached |= {int(to) for s in reached for to in automaton.next[s] if to >= 0}
    return any(automaton.accepting[s] for s in reached)


def classes_of(automaton: TokenAutomaton, row: list[int]) -> Any:
    return np.array([-1 if t == MASK else int(automaton.class_of[t]) for t in row])


@st.composite
def cases(draw: st.DrawFn) -> tuple[Constraint, list[int], torch.Tensor]:
    """A constraint, a row that can be completed, and the logits of its masks."""
    automaton = draw(automata(VOCAB, EOS))
    automaton = TokenAutomaton(
        np.append(automaton.class_of, np.int32(0)),  # the mask token's
        automaton.next,
        automaton.start,
        automaton.accepting,
        automaton.distance,
        automaton.end,
    )
    n = draw(st.integers(1, 4))
    start = draw(st.integers(0, 5))
    limit = start + draw(st.integers(0, 6))
    constraint = Constraint(automaton, automaton.start, start, start + n, limit)
    row = draw(st.lists(st.sampled_from([MASK] * 5 + list(range(VOCAB))), min_size=n, max_size=n))
    assume(MASK in row and next(ways(constraint, row), None) is not None)
    size = draw(st.sampled_from([1.0, 8.0, 100.0]))
    seed = draw(st.integers(0, 2**32 - 1))
    logits = torch.randn(row.count(MASK), VOCAB + 1, generator=torch.Generator().manual_seed(seed))
    if draw(st.booleans()):
        logits = logits.round()  # ties
    return constraint, row, logits * size


@settings(max_examples=150, deadline=None)
@given(cases(), st.sampled_from(["neg_entropy", "max_prob"]), st.sampled_from([0.0, 1.0, 0.3]))
def test_equals_all_ways_listed(
    case: tuple[Constraint, list[int], torch.Tensor], ranking: Any, temperature: float
) -> None:
    constraint, row, logits = case
    config = DecodeConfig(ranking=ranking, temperature=temperature, seed=3)
    masks = [i for i, token in enumerate(row) if token == MASK]
    positions = torch.tensor(masks) + constraint.start
    found = [tuple(way[i] for i in masks) for way in ways(constraint, row)]
    keys = perturbed(logits, keep_top, positions, config, 0) if temperature else logits
    keys = keys.double().clamp(min=-1e30).numpy()
    level = (logits.double() - logits.double().amax(-1, keepdim=True)).numpy()
    weight = np.array([sum(level[k, t] for k, t in enumerate(way)) for way in found])
    key = np.array([sum(keys[k, t] for k, t in enumerate(way)) for way in found])

    for filling in fillings(constraint, row, logits, config):
        own = tuple(filling.token.tolist())
        assert own in found
        assert sum(keys[k, t] for k, t in enumerate(own)) >= key.max() - 1e-6 * abs(key.max())
        chance = np.exp(weight - weight.max())
        chance /= chance.sum()
        for k in range(len(masks)):
            marginal = np.zeros(VOCAB)
            for way, p in zip(found, chance, strict=True):
                marginal[way[k]] += p
            assert filling.max_prob[k] == pytest.approx(marginal[own[k]], rel=1e-4, abs=1e-7)
            if filling.neg_entropy is not None:
                expected = sum(p * math.log(p) for p in marginal if p > 0)
                assert filling.neg_entropy[k] == pytest.approx(expected, rel=1e-4, abs=1e-5)
        assert (filling.neg_entropy is None) == (ranking == "max_prob")


def fillings(
    constraint: Constraint, row: list[int], logits: torch.Tensor, config: DecodeConfig
) -> list[Filling]:
    """By the plain lattice and by the fast one."""
    classes = classes_of(constraint.automaton, row)  # type: ignore[arg-type]
    positions = constraint.start + np.flatnonzero(classes < 0)
    scores = class_scores(logits, torch.from_numpy(positions), config, constraint.automaton)
    plain = fill_row(constraint, classes, scores.transposed())
    return [plain, fill_rows(constraint, classes[None], scores)]


def test_rows_together_equal_rows_alone() -> None:
    torch.manual_seed(0)
    automaton = digits(range(7), 5, 12, [11])
    rows = np.array([[-1, 2, -1, -1], [-1, -1, -1, -1], [1, -1, -1, 2]])
    rows[rows >= 0] = automaton.class_of[rows[rows >= 0]]
    constraint = Constraint(automaton, automaton.start, 3, 7, 9)
    logits = torch.randn(9, 12) * 3
    scores = class_scores(logits, torch.arange(9), DecodeConfig(), automaton)
    together = fill_rows(constraint, rows, scores)
    end = 0
    for row in rows:
        here = slice(end, end := end + int((row < 0).sum()))
        alone = fill_row(constraint, row, scores.transposed().at(here))
        assert together.token[here].tolist() == alone.token.tolist()
        np.testing.assert_allclose(together.max_prob[here], alone.max_prob)
        assert together.neg_entropy is not None
        assert alone.neg_entropy is not None
        np.testing.assert_allclose(together.neg_entropy[here], alone.neg_entropy, atol=1e-9)


def test_nothing_is_too_small() -> None:
    """Either half of the row is likely with one token and impossible with the other."""
    two_ways = alternation([[0] * 20, [1] * 20], 4, [3])
    logits = torch.zeros(20, 4)
    logits[:10, 0], logits[10:, 1] = -400, -400
    scores = class_scores(logits, torch.arange(20), DecodeConfig(), two_ways)
    constraint = Constraint(two_ways, two_ways.start, 0, 20, 20)
    found = fill_rows(constraint, np.full((1, 20), -1), scores)
    np.testing.assert_allclose(found.max_prob, 0.5)


def test_without_a_number_there_is_none() -> None:
    automaton = digits([0, 1], 3, 4, [3])
    scores = class_scores(torch.full((3, 4), torch.nan), torch.arange(3), DecodeConfig(), automaton)
    found = fill_rows(Constraint(automaton, automaton.start, 0, 3, 3), np.full((1, 3), -1), scores)
    assert np.isnan(found.max_prob).all()


def test_what_top_k_drops_is_used_where_nothing_else_fits() -> None:
    automaton = literal([2, 1], 4, [3])
    logits = torch.tensor([[5.0, 0.0, 0.0, 0.0], [0.0, 5.0, 0.0, 0.0], [5.0, 1.0, 0.0, 0.0]])
    config = DecodeConfig(temperature=1.0, top_k=1)
    scores = class_scores(logits, torch.arange(3), config, automaton)
    found = fill_rows(Constraint(automaton, automaton.start, 0, 3, 3), np.full((1, 3), -1), scores)
    assert found.token.tolist() == [2, 1, 3]
    np.testing.assert_allclose(found.max_prob, 1.0)
