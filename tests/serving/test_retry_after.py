"""How long a client is told to wait, on a clock that the test sets."""

from __future__ import annotations

import pytest

from lopa.serving.api import retry_after
from lopa.serving.api.retry_after import RetryAfter
from lopa.serving.jobs import Finished


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(retry_after, "time", found)
    return found


def finished(seconds: float, queued: float) -> Finished:
    return Finished(
        finish="eos",
        tokens=1,
        rounds=1,
        tpf=1.0,
        branches=0.0,
        seconds=seconds,
        queue_seconds=queued,
        engine_seconds=seconds + queued,
    )


def test_capacity(clock: Clock) -> None:
    """By the time that sequences run, not that they wait."""
    estimate = RetryAfter()
    assert estimate.for_capacity(1, 4, started=True) == 1  # nothing is known
    for seconds in (30.0, 50.0):
        estimate.record(finished(seconds, queued=300.0))
    assert estimate.for_capacity(1, 4, started=True) == 10
    assert estimate.for_capacity(3, 4, started=True) == 30
    assert estimate.for_capacity(1000, 4, started=True) == 600


def test_starts(clock: Clock) -> None:
    estimate = RetryAfter()
    clock.now += 40
    assert estimate.for_start() == 40  # it may take as long again
    clock.now += 10
    estimate.started()
    estimate.record(finished(8.0, queued=0.0))
    estimate.starting()
    clock.now += 20
    assert estimate.for_start() == 30  # the first took 50 seconds
    assert estimate.for_capacity(1, 4, started=False) == 32
    estimate.starting(delay=5.0)
    assert estimate.for_start() == 55
    clock.now += 105  # twice as long as the first
    assert estimate.for_start() == 100


def test_shutdown(clock: Clock) -> None:
    estimate = RetryAfter()
    clock.now += 7
    estimate.started()
    estimate.draining(30.0)
    clock.now += 10
    assert estimate.for_shutdown() == 27
    clock.now += 60
    assert estimate.for_shutdown() == 7
