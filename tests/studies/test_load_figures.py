"""The figures of `lopa study load`: what a disturbance of one run does to them."""

from __future__ import annotations

import pytest

from lopa.evaluation.sample import Sample
from lopa.studies import load


def sample(problem: int, elapsed: float, tokens: int = 10) -> Sample:
    return Sample(
        setting="",
        problem=problem,
        correct=problem % 2 == 0,
        text="",
        tokens=tokens,
        tokens_paper=tokens,
        rounds=5,
        seconds=elapsed,
        first_round_seconds=elapsed,
        finish="eos",
        by_round=(2,) * 5,
        branches=(0, 3, 3, 3, 3),
        forwarded=(64,) * 5,
        elapsed=elapsed,
    )


def test_a_disturbance_of_one_run_is_no_matter() -> None:
    """Two problems are decoded together; each run has another disturbed pair."""
    runs = [[sample(n, 0.1) for n in range(6)] for _ in range(3)]
    quiet = load._of_runs(runs, 2)
    assert quiet["tokens_per_second"] == pytest.approx(100.0)
    assert quiet["tpf"] == 2.0
    assert quiet["branches"] == pytest.approx(2.4)
    assert quiet["accuracy"] == 0.5
    disturbed = [
        [sample(n, 5.0 if n // 2 == number else 0.1) for n in range(6)] for number in range(3)
    ]
    assert load._of_runs(disturbed, 2)["tokens_per_second"] == pytest.approx(100.0)
    # What is slow in most runs counts.
    slow = [*disturbed[:1], *disturbed[:1], runs[0]]
    assert load._of_runs(slow, 2)["tokens_per_second"] == pytest.approx(60 / (10.0 + 0.4))
