"""The figures of `lopa study load`: what a disturbance of one run does to them."""

from __future__ import annotations

from dataclasses import dataclass
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


def test_a_disturbance_of_a_group_is_no_matter() -> None:
    """Two problems are a group. One setting takes twice as long as the other in all of them."""

    def runs(seconds: float, slow: dict[tuple[int, int], float]) -> list[list[Sample]]:
        """slow: by run and group, how much longer it takes."""
        return [
            [sample(n, seconds * slow.get((run, n // 2), 1.0)) for n in range(6)]
            for run in range(3)
        ]

    quiet = load.speeds({"a": runs(0.1, {}), "b": runs(0.2, {})}, 2)
    assert quiet == pytest.approx({"a": 100.0, "b": 50.0})
    # The machine is three times as slow in some groups, and one setting was disturbed by itself.
    slow = {(0, 0): 3.0, (1, 1): 3.0, (1, 2): 3.0}
    found = load.speeds({"a": runs(0.1, {**slow, (2, 2): 9.0}), "b": runs(0.2, slow)}, 2)
    assert found["a"] / found["b"] == pytest.approx(2.0)
    assert found["b"] < 50.0
    # What is slow in most groups counts.
    most = {(run, group): 4.0 for run in range(2) for group in range(3)}
    found = load.speeds({"a": runs(0.1, most), "b": runs(0.2, {})}, 2)
    assert found["a"] / found["b"] == pytest.approx(0.5)
    # The wider the more groups differ
    same = load.interval({"a": runs(0.1, slow), "b": runs(0.2, slow)}, 2, "a", "b")
    assert same == pytest.approx([2.0, 2.0])
    some = {(0, 0): 1.5, (0, 2): 1.2, (1, 1): 0.8}
    low, high = load.interval({"a": runs(0.1, some), "b": runs(0.2, {})}, 2, "a", "b")
    assert 2.0 / 1.5 <= low < 2.0 < high <= 2.0 / 0.8


def test_figures_of_some_answers() -> None:
    found = load._figures([sample(n, 0.1) for n in range(6)])
    assert found["tokens_per_second"] == pytest.approx(100.0)
    assert found["tpf"] == 2.0
    assert found["branches"] == pytest.approx(2.4)
    assert found["accuracy"] == 0.5


class SlowingMachine:
    """A clock, and an LLM whose rounds take ever longer. config: seconds of its rounds at first."""

    def __init__(self, rounds: dict[float, int]) -> None:
        self.now = 0.0
        self.rounds = rounds

    def perf_counter(self) -> float:
        return self.now

    def engine(self, **_: Any) -> Any:
        return SlowingEngine(self)

    def session(self, prompt: str, config: float, cost: None) -> Any:
        brought = SimpleNamespace(brought=200 // self.rounds[config])  # 200 tokens in all
        return SlowingSession(config, brought)


@dataclass(frozen=True, eq=False)
class SlowingSession:
    seconds: float
    decoder: SimpleNamespace


class SlowingEngine:
    def __init__(self, machine: SlowingMachine) -> None:
        self.machine, self.overlap, self.left = machine, True, 0
        self.in_flight: list[str] = []

    @property
    def busy(self) -> bool:
        return self.left > 0

    def add(self, session: SlowingSession) -> None:
        self.left, self.session = self.machine.rounds[session.seconds], session

    def step(self) -> list[Any]:
        machine = self.machine
        self.left -= 1
        self.in_flight = ["the next round"] if self.overlap and self.left else []
        machine.now += self.session.seconds * (1.0 + 0.2 * machine.now)
        return [(self.session, SimpleNamespace(output=None if self.left else "answer"))]


def test_settings_take_turns_on_a_machine_that_slows_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """One takes twice the time of the other, and does so in turns of a moment."""
    machine = SlowingMachine({0.01: 200, 0.04: 100})
    monkeypatch.setattr(load, "time", machine)
    monkeypatch.setattr(load, "make_sample", lambda *_, elapsed: SimpleNamespace(elapsed=elapsed))
    made_up: Any = machine
    runs = {
        name: load.Run(made_up, made_up.engine(), seconds, ["a"])
        for name, seconds in (("short", 0.01), ("long", 0.04))
    }
    load.take_turns(runs)
    (short,), (long,) = runs["short"].samples, runs["long"].samples
    assert 1.9 < long.elapsed / short.elapsed < 2.1
    assert short.elapsed + long.elapsed == pytest.approx(machine.now)
    assert all(run.engine.overlap for run in runs.values())


def test_no_round_of_another_setting_is_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = SlowingMachine({0.01: 200})
    monkeypatch.setattr(load, "time", machine)
    made_up: Any = machine
    run = load.Run(made_up, made_up.engine(), 0.01, ["a"])  # type: ignore[arg-type]
    run.take_turn()
    assert run.engine.busy
    assert not run.engine.in_flight
    assert load.TURN <= run.clock < 2 * load.TURN
