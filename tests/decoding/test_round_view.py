from __future__ import annotations

import numpy as np
import pytest

from lopa.decoding.round_view import RoundView
from lopa.decoding.windows import Frame
from lopa.types import Plan, Stats

EOS = 7
WANTED = np.array([[0, 0, 1, 0, 1], [0, 0, 1, 1, 0]], bool)
PLAN = Plan(
    index=1,
    start=10,
    cached=10,
    commit=2,
    rows=np.zeros((2, 5), np.int64),
    row_ends=np.array([15, 15]),
    wanted=WANTED,
    block_ids=None,
)
FRAME = Frame(
    start=10,
    cached=10,
    commit=2,
    first=1,
    blocks=[1, 1],
    row_ends=[15, 15],
    may_force=np.ones((2, 1), np.bool_),
)


def test_statistics_come_to_their_places_and_nothing_is_elsewhere() -> None:
    stats = Stats(np.array([3, EOS, 4, 5]), np.arange(4) / 4, -np.arange(4.0))
    view = RoundView.of(PLAN, FRAME, stats, 9, 3, [EOS])
    assert view.offset == 12
    assert view.masks.tolist() == WANTED[:, 2:].tolist()
    assert view.token.tolist() == [[3, -1, EOS], [4, 5, -1]]
    np.testing.assert_array_equal(view.max_prob, [[0.0, np.nan, 0.25], [0.5, 0.75, np.nan]])
    np.testing.assert_array_equal(view.ranking, [[0.0, np.nan, -1.0], [-2.0, -3.0, np.nan]])
    assert view.is_eos.tolist() == [[False, False, True], [False, False, False]]


def test_a_threshold_means_the_same_whatever_they_were_found_in() -> None:
    found = np.array([0.1, 0.2, 0.3, 0.4], np.float32)
    view = RoundView.of(PLAN, FRAME, Stats(np.arange(4), found, found), 9, 3, [])
    assert view.max_prob.dtype == view.ranking.dtype == np.float64
    assert view.max_prob[WANTED[:, 2:]].tolist() == found.tolist()


def test_statistics_of_another_plan_are_refused() -> None:
    with pytest.raises(ValueError, match="assign"):
        RoundView.of(PLAN, FRAME, Stats(*np.zeros((3, 5))), 9, 3, [])
