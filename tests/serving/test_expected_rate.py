"""How fast a request would be on an engine that runs others."""

from __future__ import annotations

import itertools

from lopa.decoding.round_cost import USUAL_ROW, RoundCost
from lopa.serving.expected_rate import expected_rate

GPU = RoundCost(((64, 0.43e-3), (512, 0.56e-3), (4096, 1.31e-3)), (0.09e-3,) * 5)


def test_the_more_others_the_slower() -> None:
    rates = [expected_rate(GPU, running) for running in range(40)]
    assert all(a > b for a, b in itertools.pairwise(rates))


def test_a_faster_device_may_have_more_requests() -> None:
    points = tuple((t, 4 * s) for t, s in GPU.points)
    slow = RoundCost(points, tuple(4 * s for s in GPU.host))
    assert expected_rate(GPU, 0) > expected_rate(slow, 0)
    assert expected_rate(GPU, 2) > expected_rate(slow, 0) > expected_rate(GPU, 200)


def test_rows_that_cost_nothing_are_all_taken() -> None:
    flat = RoundCost(((1, 0.001),))
    dear = RoundCost(((USUAL_ROW, 0.001), (16 * USUAL_ROW, 0.016)))
    assert expected_rate(flat, 0) > 2 * expected_rate(dear, 0)
