"""`accept="agreed"`: which branches may win; test_plain_loop.py has whole runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from made_up import MASK, MadeUp, drive, new_decoder

from lopa import LLM
from lopa.config import DecodeConfig
from lopa.decoding.lookahead import OTHER_TOKEN, Selection, disagreements, select
from lopa.decoding.round_view import RoundView
from lopa.types import Branch, Draft, Lookahead

CONFIG = DecodeConfig(agreement=0.25, agreement_ahead=0.75)


def at(position: int, token: int = 0) -> Lookahead:
    return Lookahead(position, token, -1.0, 0.5)


def view_of_anchor(max_prob: list[float], masks: list[bool] | None = None) -> RoundView:
    """Blocks of two from position 10 on, in which the anchor predicts token 0; and two branches
    that predict something else with confidence."""
    rows = np.array([[0.99] * len(max_prob)] * 2 + [max_prob])
    token = np.array([[5] * len(max_prob)] * 2 + [[0] * len(max_prob)])
    there = np.array([masks or [True] * len(max_prob)] * 3)
    return RoundView(10, 2, there, token, rows, rows, [7])


@pytest.mark.parametrize(
    ("drafts", "refused"),
    [
        ([(at(10),), (at(11),)], {}),
        ([(at(10, token=5),), (at(11),)], {0: OTHER_TOKEN}),  # its own row does not matter
        ([(at(12),), (at(13),)], {0: "anchor at most 0.75"}),  # in the block behind
        ([(at(10), at(11)), (at(10), at(12))], {1: "anchor at most 0.75"}),  # of several: each
        ([(at(10), at(13)), (at(13, token=5), at(10))], {1: OTHER_TOKEN}),
    ],
)
def test_the_anchor_is_asked_for_every_token(drafts: list[Draft], refused: dict[int, str]) -> None:
    assert disagreements(view_of_anchor([0.3, 0.3, 0.75, 0.9]), drafts, CONFIG) == refused


def test_the_probability_must_be_above() -> None:
    view = view_of_anchor([0.25, 0.2500001, 0.75, 0.9])
    found = disagreements(view, [(at(10),), (at(11),)], CONFIG)
    assert found == {0: "anchor at most 0.25"}


def test_the_block_of_the_first_mask_is_not_ahead() -> None:
    """Whichever it is: here the first is full."""
    view = view_of_anchor([np.nan, np.nan, 0.3, 0.3, 0.3, 0.3], [False, False, *[True] * 4])
    assert disagreements(view, [(at(12),), (at(14),)], CONFIG) == {1: "anchor at most 0.75"}


def test_refused_rows_are_out_of_the_running() -> None:
    scores = np.array([3.0, 1.0, 2.0, 1.0])
    selection = select(scores, {0: "why", 2: "why not"})
    assert selection.winner == 1  # a tie with the anchor
    assert selection.scores.tolist() == [3.0, 1.0, 2.0, 1.0]
    assert selection.allowed == [-np.inf, 1.0, -np.inf, 1.0]
    assert scores.tolist() == [3.0, 1.0, 2.0, 1.0]  # allowed is a copy
    assert select(scores, dict.fromkeys(range(3), "why")).winner == 3
    assert Selection(0, scores).allowed == scores.tolist()
    below = select(np.array([-5.0, -9.0]), {0: "why"})
    assert below.winner == 1


def check_branch(branch: Branch, config: DecodeConfig) -> None:
    (ahead,), (opinion,) = branch.lookaheads, branch.anchor
    if branch.refused == OTHER_TOKEN:
        assert opinion.token != ahead.token
    elif branch.refused:
        assert opinion.max_prob <= max(config.agreement, config.agreement_ahead)
    else:
        assert opinion.token == ahead.token
        assert opinion.max_prob > min(config.agreement, config.agreement_ahead)


class Noisy(MadeUp):
    """Samples: logits that depend on the row, with noise that a position keeps in all rows and
    rounds, and the probability of the token without it."""

    def at(self, index: int, row: tuple[int, ...], position: int) -> tuple[int, float, float]:
        known = sum((p + 1) * t for p, t in enumerate(row) if t != MASK)
        steady = np.random.default_rng([self.seed, position])
        logits, noise = steady.normal(size=6), steady.gumbel(size=6)
        logits = logits + 0.5 * np.random.default_rng([self.seed, position, known]).normal(size=6)
        token = int((logits + noise).argmax())
        max_prob = float(np.float32(np.exp(logits[token]) / np.exp(logits).sum()))
        return token, max_prob, max_prob


def test_a_sample_that_the_anchor_does_not_draw_again_may_not_win() -> None:
    config = DecodeConfig(
        max_new_tokens=32, block_size=8, temperature=1.0, agreement=0.2, agreement_ahead=0.3
    )
    found: list[Branch] = []
    for seed in range(5):
        for record in drive(new_decoder(config), Noisy(seed)):
            found += record.branches[:-1]
            assert not record.branches[record.winner].refused
    for branch in found:
        check_branch(branch, config)
    reasons = {branch.refused for branch in found}
    assert reasons == {"", OTHER_TOKEN, "anchor at most 0.2", "anchor at most 0.3"}


def test_agreement_when_a_model_samples() -> None:
    """It draws the same again far more often than by chance: a position keeps its noise."""
    options: dict[str, Any] = {"max_new_tokens": 32, "block_size": 8, "branches": 5}
    config = DecodeConfig(**options, temperature=1.5, seed=1, agreement=0.0, agreement_ahead=0.0)
    llm = LLM("dummy:dream-tiny", device="cpu")
    output = llm.generate("Hello there", config)
    rounds = output.trace.rounds
    branches = [branch for record in rounds for branch in record.branches[:-1]]
    for branch in branches:
        check_branch(branch, config)
    agreed = [branch for branch in branches if not branch.refused]
    by_chance = sum(branch.anchor[0].max_prob for branch in branches)
    assert 2 * by_chance < len(agreed) < len(branches)
    for record in rounds:
        winner = record.branches[record.winner]
        assert [a.token for a in winner.lookaheads] == [o.token for o in winner.anchor]
    assert any(record.branches[record.winner].lookaheads for record in rounds)
