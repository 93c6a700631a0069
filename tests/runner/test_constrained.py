"""Statistics of plans that have to fit: which rows are looked at, and what is kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from small_automata import digits

from lopa import DecodeConfig
from lopa.runner.class_scores import class_scores
from lopa.runner.constrained import constrained_statistics, keep_filled, row_groups
from lopa.types import Constraint, Plan

VOCAB, MASK, EOS = 12, 10, 11
AUTOMATON = digits(range(5), 6, VOCAB, [EOS])
# Position 4 on; the automaton is read from 5 on. The second row is a copy, of which nothing is
# wanted; the third is shorter.
ROWS = np.array(
    [[9, 1, MASK, 3, MASK, MASK], [9, 1, MASK, MASK, MASK, MASK], [9, MASK, MASK, 2, 7, 7]]
)


def plan(edits: bool = False) -> Plan:
    ends = np.array([10, 10, 8])
    wanted = np.arange(4, 10) < ends[:, None]
    wanted &= (ROWS == MASK) if not edits else np.arange(4, 10) > 4
    wanted[1] = False
    constraint = Constraint(AUTOMATON, AUTOMATON.start, 5, 10, 11)
    return Plan(1, 4, 0, 0, ROWS, ends, wanted, None, constraint)


def found(plan: Plan, config: DecodeConfig) -> tuple[Any, ...]:
    torch.manual_seed(0)
    count = int(plan.wanted.sum())
    scores = class_scores(torch.randn(count, VOCAB), torch.arange(count), config, AUTOMATON)
    return constrained_statistics(plan, scores, MASK, config)


def test_rows_of_one_length_go_together() -> None:
    short, long = row_groups(plan(), MASK)
    assert short.rows.tolist() == [2]
    assert short.classes.shape == (1, 3)
    assert long.rows.tolist() == [0]
    assert (long.classes < 0).tolist() == [[False, True, False, True, True]]


@pytest.mark.parametrize("ranking", ["max_prob", "neg_entropy"])
def test_filled_tokens_stay(ranking: Any) -> None:
    config = DecodeConfig(ranking=ranking, edit_threshold=0.5)
    editing = plan(edits=True)
    token, max_prob, ranks = found(editing, config)
    there = ROWS[editing.wanted]
    filled = there != MASK
    assert filled.any()
    assert token[filled].tolist() == there[filled].tolist()
    assert (max_prob[filled] == 1.0).all()
    assert (ranks[filled] == (1.0 if ranking == "max_prob" else 0.0)).all()
    again = np.where(filled, 0, token), np.where(filled, 0.0, max_prob), np.where(filled, 5, ranks)
    keep_filled(editing, MASK, config, again)
    for ours, expected in zip(again, (token, max_prob, ranks), strict=True):
        assert ours.tolist() == expected.tolist()


def test_a_mask_that_is_not_wanted_is_noticed() -> None:
    lacking = plan()
    lacking.wanted[0, 2] = False
    with pytest.raises(RuntimeError, match="not wanted"):
        found(lacking, DecodeConfig())
