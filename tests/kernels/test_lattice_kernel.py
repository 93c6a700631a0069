"""The lattice kernels against the plain lattice."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from small_automata import automaton_of, balanced

from lopa import DecodeConfig
from lopa.grammar.token_automaton import TokenAutomaton
from lopa.kernels.triton.confidence import RANKINGS
from lopa.kernels.triton.lattice import Tiling, fill_lattice
from lopa.runner.class_scores import class_scores
from lopa.runner.constrained import constrained_statistics
from lopa.runner.device_automaton import lattice_rows, make_tables, tables_of
from lopa.types import Constraint, Plan

VOCAB, MASK, EOS = 1300, 7, 8
CPU = torch.device("cpu")
# Partial sums of partial sums, chunks of a class, tiles that are not full
SMALL = Tiling(lanes=32, inputs=2, chunk=256, positions=3, states=2)


def pairs() -> TokenAutomaton:
    """Wide classes and narrow ones; some tokens are in one state's strings and not in another's."""
    text = range(40, 1200)
    table = [
        {9: 1},
        {10: 2, 11: 3},
        {**dict.fromkeys(text, 2), 12: 4, 13: 0},
        {**dict.fromkeys(range(40, 60), 3), **dict.fromkeys(range(30, 35), 5), 14: 4},
        {15: 0, 16: 5, 17: 6},
        {17: 6, **dict.fromkeys(range(20, 30), 5)},
        {},
    ]
    return automaton_of(table, [6], VOCAB, [EOS])


def plan_of(automaton: TokenAutomaton, rows: list[list[int]], ends: list[int], left: int) -> Plan:
    """The rows begin at position 3; the automaton is read from 5 on."""
    tokens = np.array(rows)
    wanted = (tokens == MASK) & (np.arange(3, 3 + tokens.shape[1]) < np.array(ends)[:, None])
    constraint = Constraint(automaton, automaton.start, 5, 3 + tokens.shape[1], 5 + left)
    return Plan(1, 3, 0, 0, tokens, np.array(ends), wanted, None, constraint)


def plans() -> list[Plan]:
    m, free = MASK, pairs()
    first = plan_of(
        free,
        [[1, 2, *[m] * 12], [1, 2, m, m, 50, *[m] * 9], [1, 2, 9, *[m] * 6, 12, m, m, m, m]],
        [17, 17, 13],
        20,
    )
    second = plan_of(free, [[1, 2, *[m] * 8]], [13], 8)
    return [first, second]


@pytest.mark.engine
@pytest.mark.parametrize(
    ("ranking", "temperature", "size"),
    [
        ("neg_entropy", 0.0, 3.0),
        ("max_prob", 0.8, 3.0),
        ("neg_entropy", 0.8, 12.0),
        ("max_prob", 0.0, 12.0),
    ],
)
def test_equals_the_plain_lattice(ranking: Any, temperature: float, size: float) -> None:
    torch.manual_seed(3)
    config = DecodeConfig(ranking=ranking, temperature=temperature, seed=2**60 + 3)
    both = plans()
    automaton = both[0].constraint.automaton  # type: ignore[union-attr]
    wanted = [plan.wanted.nonzero() for plan in both]
    positions = torch.from_numpy(np.concatenate([3 + column for _, column in wanted]))
    logits = size * torch.randn(len(positions), VOCAB)
    logits[0, 100] = logits[0, 90] = 40.0  # a tie
    logits[1, 200] = -torch.inf
    tiling = Tiling() if size == 12.0 else SMALL
    out = check_against_plain(both, automaton, config, logits, positions, tiling)
    assert (out[1] > 0.999).any()


def check_against_plain(
    both: list[Plan],
    automaton: Any,
    config: DecodeConfig,
    logits: torch.Tensor,
    positions: torch.Tensor,
    tiling: Tiling,
) -> Any:
    expected = []
    end = 0
    for plan in both:
        here = slice(end, end := end + int(plan.wanted.sum()))
        scores = class_scores(logits[here], positions[here], config, automaton)
        expected.append(constrained_statistics(plan, scores, MASK, config))
    token, max_prob, ranks = (np.concatenate(x) for x in zip(*expected, strict=True))
    own = config.seed, 0, RANKINGS[config.ranking]
    settings = torch.stack([positions, *(torch.full_like(positions, n) for n in own)], 1)
    heat = torch.full((len(positions),), config.temperature)
    out = torch.full((3, len(positions) + 2), -7, dtype=torch.int32)
    fill_lattice(
        logits,
        settings,
        heat,
        make_tables(automaton, CPU, tiling),
        lattice_rows(both, MASK, CPU),
        out,
        1,
        sampling=config.temperature > 0,
    )
    assert out[:, 0].tolist() == out[:, -1].tolist() == [-7] * 3
    out = out[:, 1:-1]
    assert out[0].tolist() == token.tolist()
    found = out[1:].view(torch.float32).double().numpy()
    np.testing.assert_allclose(found[0], max_prob, rtol=2e-4, atol=1e-6)
    np.testing.assert_allclose(found[1], ranks, rtol=1e-3, atol=1e-4)
    return token, max_prob


def test_few_states_and_classes() -> None:
    torch.manual_seed(1)
    automaton = balanced(40, 41, [50, 51], 2, VOCAB, [EOS])
    plan = plan_of(automaton, [[1, 2, *[MASK] * 6]], [11], 6)
    positions = torch.arange(5, 11)
    logits = torch.randn(6, VOCAB)
    check_against_plain([plan], automaton, DecodeConfig(), logits, positions, Tiling())


def test_states_of_many_transitions() -> None:
    """From one state to 11 others, from these to one: more than a node has inputs."""
    torch.manual_seed(2)
    table: list[dict[int, int]] = [{20 + i: 1 + i for i in range(11)}]
    table += [{40 + i: 12, 60: 1 + i} for i in range(11)]
    automaton = automaton_of([*table, {60: 0, 61: 13}, {}], [13], VOCAB, [EOS])
    plan = plan_of(automaton, [[1, 2, *[MASK] * 7], [1, 2, 25, MASK, 60, *[MASK] * 4]], [12] * 2, 7)
    row, column = plan.wanted.nonzero()
    logits, positions = 2 * torch.randn(len(row), VOCAB), torch.from_numpy(3 + column)
    check_against_plain([plan], automaton, DecodeConfig(), logits, positions, SMALL)


def test_more_states_than_a_row_reaches() -> None:
    """Three tiles: one behind the row's state, one that it is in, one that it comes to later."""
    torch.manual_seed(4)
    table = [{20 + i % 5: i + 1, 60: i, 61: min(i + 30, 90)} for i in range(90)]
    automaton = automaton_of([*table, {}], [90], VOCAB, [EOS])
    plan = plan_of(automaton, [[1, 2, *[MASK] * 5], [1, 2, 61, MASK, MASK, 60, MASK]], [10] * 2, 60)
    assert plan.constraint is not None
    plan.constraint = plan.constraint._replace(state=40)
    row, column = plan.wanted.nonzero()
    logits, positions = 2 * torch.randn(len(row), VOCAB), torch.from_numpy(3 + column)
    check_against_plain([plan], automaton, DecodeConfig(), logits, positions, SMALL)


def test_what_is_no_number_stays_none() -> None:
    automaton = balanced(40, 41, [50, 51], 2, VOCAB, [EOS])
    plan = plan_of(automaton, [[1, 2, *[MASK] * 6]], [11], 6)
    out = torch.zeros(3, 6, dtype=torch.int32)
    settings = torch.zeros(6, 4, dtype=torch.int64)
    logits = torch.full((6, VOCAB), torch.nan)
    tables, rows = tables_of(automaton, CPU), lattice_rows([plan], MASK, CPU)
    fill_lattice(logits, settings, torch.zeros(6), tables, rows, out, 0, sampling=False)
    assert out[1].view(torch.float32).isnan().all()
