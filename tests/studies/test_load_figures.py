"""The figures of `lopa study load`: what a disturbance of one run does to them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

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


class SlowingMachine:
    """A clock, and an LLM whose rounds take ever longer. config: seconds of its rounds at first."""

    def __init__(self, rounds: dict[float, int], is_async: bool) -> None:
        self.now = 0.0
        self.rounds = rounds
        self.runner = SimpleNamespace(is_async=is_async)

    def perf_counter(self) -> float:
        return self.now

    def engine(self, **_: Any) -> Any:
        return SlowingEngine(self)

    def session(self, prompt: str, config: float, cost: None) -> float:
        return config


class SlowingEngine:
    def __init__(self, machine: SlowingMachine) -> None:
        self.machine, self.overlap, self.left, self.seconds = machine, False, 0, 0.0

    @property
    def busy(self) -> bool:
        return self.left > 0

    def add(self, seconds: float) -> None:
        self.left, self.seconds = self.machine.rounds[seconds], seconds

    def step(self) -> list[Any]:
        machine = self.machine
        self.left -= 1
        machine.now += self.seconds * (1.0 + 0.2 * machine.now)
        return [(self.seconds, SimpleNamespace(output=None if self.left else "answer"))]


@pytest.mark.parametrize(("is_async", "alike"), [(False, True), (True, False)])
def test_settings_take_turns_on_a_machine_that_slows_down(
    is_async: bool, alike: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two that take the same time in all: round by round they do, one after the other not."""
    machine = SlowingMachine({0.01: 200, 0.04: 50}, is_async)
    monkeypatch.setattr(load, "time", machine)
    monkeypatch.setattr(load, "make_sample", lambda *_, elapsed: SimpleNamespace(elapsed=elapsed))
    found: Any = load._take_turns(machine, ["a"], {"short": 0.01, "long": 0.04}, 1)  # type: ignore[arg-type, dict-item]
    (short,), (long,) = found["short"], found["long"]
    assert (0.95 < short.elapsed / long.elapsed < 1.05) == alike
    assert short.elapsed + long.elapsed == pytest.approx(machine.now)
