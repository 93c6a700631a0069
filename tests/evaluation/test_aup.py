from __future__ import annotations

import math

import pytest

from lopa.evaluation.aup import aup


def test_by_hand() -> None:
    # 1·80 + ½·1·(80 + 80) + ½·2·(76·e^(−0.15) + 80): 76 is 5 % under the best.
    expected = 80 + 80 + 76 * math.exp(-0.15) + 80
    assert aup([(4, 76), (1, 80), (2, 80)]) == pytest.approx(expected)
    assert expected == pytest.approx(305.4138, abs=1e-4)


def test_a_point_far_under_the_first_does_not_count() -> None:
    assert aup([(1, 80), (2, 80), (9, 74.9)]) == aup([(1, 80), (2, 80)]) == 160
    assert aup([(1, 80), (2, 75)]) > aup([(1, 80)])  # exactly five points under it does


def test_one_point_none_and_nothing_right() -> None:
    assert aup([(5.1, 94.6)]) == pytest.approx(5.1 * 94.6)
    assert aup([]) == 0
    assert aup([(1, 0.0), (2, 0.0)]) == 0


def test_measured_by_the_best_of_several_curves() -> None:
    # Both points are 10 % under the given best.
    assert aup([(1, 90), (2, 90)], best=100) == pytest.approx(90 + 90 * math.exp(-0.3))
    assert aup([(1, 90), (2, 95)], best=90) == pytest.approx(90 + 0.5 * (90 + 95))  # never above 1
