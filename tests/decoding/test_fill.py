from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lopa.config import DecodeConfig
from lopa.decoding import fill, lookahead
from lopa.decoding.round_view import Anchor, RoundView
from lopa.types import BoolArray, Draft, FloatArray, Lookahead


@pytest.mark.parametrize("steps", [*range(1, 70), 128, 256, 511, 512, 1000])
def test_dream_schedule_is_torchs(steps: int) -> None:
    """Same float32 timesteps as the published loop, so the same counts, to the last bit."""
    times = torch.linspace(1, 1e-3, steps + 1)
    for masks in (1, 7, 32, 255, 512):
        left = masks
        for step in range(steps):
            t, s = times[step], times[step + 1]
            share = torch.tensor(float(left)) * (1 - s / t)
            expected = int(share) if step < steps - 1 else left
            assert fill.schedule_count(left, step, steps) == expected
            left -= expected


@given(st.integers(0, 100), st.integers(1, 20))
def test_quota_shares_everything_out(masks: int, steps: int) -> None:
    shares = [fill.block_quota(masks, step, steps) for step in range(steps)]
    assert sum(shares) == masks
    assert sorted(shares, reverse=True) == shares
    assert max(shares) - min(shares) <= 1


def walk(confidences: list[float], factor: float) -> int:
    """The published walk over sorted confidences, as the specification tells it."""
    accepted = 0
    for k, confidence in enumerate(confidences, start=1):
        accepted = k - 1
        if k > 1 and confidence < 1 - factor / (k + 1):
            break
    if accepted in (0, len(confidences) - 1):
        accepted += 1
    return accepted


@given(st.lists(st.integers(0, 100), min_size=1, max_size=12), st.sampled_from([0.2, 1.0, 3.0]))
def test_factor_rule(levels: list[int], factor: float) -> None:
    confidence = np.array([[x / 100 for x in levels]], np.float32)
    cells = fill.Cells(np.ones_like(confidence, bool), confidence, confidence, np.ones(1, bool))
    ranked = sorted(confidence[0].astype(float).tolist(), reverse=True)
    assert fill.by_factor(cells, factor).chosen.sum() == walk(ranked, factor)


def test_threshold_is_strict_for_d2f_and_not_for_fast_dllm() -> None:
    p = np.array([[0.5, 0.9, 0.95]], np.float32)
    cells = fill.Cells(np.ones_like(p, bool), p, p, np.ones(1, bool))
    assert fill.above_threshold(cells, 0.9).chosen.tolist() == [[False, False, True]]
    assert fill.best_and_threshold(cells, 0.9).chosen.tolist() == [[False, True, True]]
    assert fill.above_threshold(cells, 0.99).forced.tolist() == [[False, False, True]]
    rows = fill.Cells(*(np.stack([x, x]) for x in cells[:4]))
    both, one = (fill.above_threshold(some, 0.99) for some in (rows, cells))
    assert [x.tolist() for x in both[:2]] == [[x.tolist()] * 2 for x in one[:2]]
    semi = cells._replace(may_force=np.zeros(1, bool))
    assert not fill.above_threshold(semi, 0.99).chosen.any()


RANKING = np.array([[0.1, 0.2, 0.9, 0.8], [0.5, 0.5, 0.5, 0.5], [1.0, 1.0, 1.0, 1.0]], np.float32)
MASKS = np.array([[1, 1, 1, 1], [0, 1, 1, 1], [0, 0, 0, 0]], bool)
AHEAD: list[Draft] = [(Lookahead(0, 0, 0.3, 0.3),), (Lookahead(1, 0, 0.2, 0.2),)]


def view_at(masks: BoolArray, found: FloatArray, is_eos: BoolArray | None = None) -> RoundView:
    """found: what positions are ranked by, and the probability of their tokens as well."""
    tokens = np.zeros(masks.shape, np.int64)
    if is_eos is not None:
        tokens[is_eos] = 7
    return RoundView(0, 2, masks, tokens, found, found, [7])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"score": "mean"}, [0.5, 0.5, 1.0]),
        ({"score": "mean", "score_fraction": 0.5}, [0.15, 0.5, 1.0]),
        ({"score": "window", "score_window": 2}, [0.15, 0.5, 1.0]),
        ({"score": "segment"}, [0.15, 0.5, 1.0]),
        ({"accept": "score", "threshold": 0.4}, [2.7 * 0.3**0.5, 2.5 * 0.2**0.5, 0.0]),
        ({"score": "fills", "threshold": 0.4, "creation_weight": 0.0}, [2.7, 2.5, 0.0]),
        ({"score": "fills", "threshold": 0.4, "creation_weight": 1.0}, [0.81, 0.5, 0.0]),
        ({"score": "mean", "creation_weight": 0.5}, [0.4, 0.35, 1.0]),
    ],
)
def test_scores(options: dict[str, object], expected: list[float]) -> None:
    config = DecodeConfig(**options)  # type: ignore[arg-type]
    scores = lookahead.score(view_at(MASKS, RANKING), AHEAD, config)
    assert scores.tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"score": "mean", "creation_weight": 0.5}, [0.35, 0.4, 1.0]),
        ({"score": "fills", "threshold": 0.4, "creation_weight": 1.0}, [0.2 * 3.7, 0.75, 0.0]),
    ],
)
def test_of_several_lookaheads_the_least_confident_is_the_weight(
    options: dict[str, object], expected: list[float]
) -> None:
    """And all of them are tokens that the branch brings."""
    (first,), (second,) = AHEAD
    several = [(first, second), (replace(first, max_prob=0.3),)]
    config = DecodeConfig(**options)  # type: ignore[arg-type]
    scores = lookahead.score(view_at(MASKS, RANKING), several, config)
    assert scores.tolist() == pytest.approx(expected)


def test_eos_tokens_are_no_fills() -> None:
    config = DecodeConfig(score="fills", threshold=0.4, creation_weight=0.0)
    is_eos = np.array([[0, 0, 1, 0], [0, 0, 0, 0], [0, 0, 0, 0]], bool)
    scores = lookahead.score(view_at(MASKS, RANKING, is_eos), AHEAD, config)
    assert scores.tolist() == pytest.approx([1.8, 2.5, 0.0])


@pytest.mark.parametrize(
    ("top_prob", "brings", "wins"),
    [(0.8, [0.95, 0.95], True), (0.2, [0.95, 0.95], False), (0.9, [0.95, 0.5], False)],
)
def test_a_branch_without_rivals_must_bring_more_than_the_anchor(
    top_prob: float, brings: list[float], wins: bool
) -> None:
    """Its own token does not count there, as it does among rivals, and a tie is the anchor's."""
    found = np.array([brings, [0.95, 0.5]], np.float32)
    masks = np.ones((3, 2), bool)
    config = DecodeConfig(threshold=0.9, accept="score")
    lone: list[Draft] = [(Lookahead(0, 0, top_prob, top_prob),)]
    scores = lookahead.score(view_at(masks[:2], found), lone, config)
    assert (lookahead.select(scores).winner == 0) == wins
    brought = sum(p for p in brings if p > 0.9)
    assert scores[0] == pytest.approx(top_prob**0.5 * brought)  # what it is worth, won or lost
    assert scores[1] == pytest.approx(0.95)
    tie = found[[1, 1]]
    certain: list[Draft] = [(Lookahead(0, 0, 1.0, 1.0),)]
    scores = lookahead.score(view_at(masks[:2], tie), certain, config)
    assert lookahead.select(scores).winner == 1
    assert scores[0] == pytest.approx(0.95)
    rivals = [*lone, (Lookahead(1, 0, 0.1, 0.1),)]
    scores = lookahead.score(view_at(masks, found[[0, 0, 1]]), rivals, config)
    assert scores[0] == pytest.approx(top_prob**0.5 * (1 + sum(p for p in brings if p > 0.9)))


def test_a_branch_without_rivals_that_the_anchor_agrees_with() -> None:
    """Its own token counts as one, and a tie is its own."""
    found = np.array([[0.5, 0.5], [0.95, 0.5]], np.float32)
    config = DecodeConfig(threshold=0.9, creation_weight=0.0)
    certain: list[Draft] = [(Lookahead(1, 0, 0.2, 0.2),)]
    scores = lookahead.score(view_at(np.ones((2, 2), bool), found), certain, config)
    assert scores.tolist() == pytest.approx([1.0, 0.95])
    assert lookahead.select(np.array([1.0, 1.0])).winner == 0


@pytest.mark.parametrize("seed", range(30))
def test_whether_the_first_would_win_alone(seed: int) -> None:
    rng = np.random.default_rng(seed)
    found = rng.choice([0.3, 0.92, 0.97], (4, 6)).astype(np.float32)
    masks, is_eos = rng.random((4, 6)) < 0.8, rng.random((4, 6)) < 0.1
    ahead: list[Draft] = [(Lookahead(i, 0, 0.0, float(p)),) for i, p in enumerate(rng.random(3))]
    config = DecodeConfig(threshold=0.9, accept="score")
    scores = lookahead.score(view_at(masks, found, is_eos), ahead, config).tolist()
    pair = [0, 3]
    two = view_at(masks[pair], found[pair], is_eos[pair])
    alone = lookahead.score(two, ahead[:1], config)
    assert lookahead.wins_alone(scores, ahead, config) == (lookahead.select(alone).winner == 0)
    by_mean = DecodeConfig(accept="score", score="mean")
    assert lookahead.wins_alone(scores, ahead, by_mean) is None
    assert lookahead.wins_alone(scores, ahead, DecodeConfig(accept="agreed")) is None


def test_spawn_ranks_and_keeps_the_floor() -> None:
    ranking = np.array([0.3, 0.9, 0.3, 0.5], np.float32)
    view = view_at(np.ones((2, 4), bool), np.stack([0 * ranking, ranking]))
    view = replace(view, offset=10, token=np.stack([np.zeros(4, int), np.arange(4)]))
    free = np.array([True, False, True, True])
    every = np.ones(4, bool)
    anchor = Anchor(view, [], 1, free, ~every, np.arange(4), every[:1], most=2)
    found = lookahead.spawn(anchor, ranking, DecodeConfig())
    assert found == [(Lookahead(13, 3, 0.5, 0.5),), (Lookahead(10, 0, *[float(ranking[0])] * 2),)]
    above = DecodeConfig(lookahead_floor=0.4)
    assert [d.position for (d,) in lookahead.spawn(anchor, ranking, above)] == [13]
