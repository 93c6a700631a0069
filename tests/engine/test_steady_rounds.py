"""Rounds that are timed, by the host's clock and by the device's."""

from __future__ import annotations

import gc
from typing import Any

import pytest
from ahead import Eager

from lopa import LLM
from lopa.bench.ceilings import Ceilings
from lopa.bench.gc_frozen import frozen
from lopa.bench.rounds import SteadyRounds
from lopa.errors import ConfigError
from lopa.runner.backend_torch import PendingStats, TorchBackend
from lopa.runner.batch import Batch
from lopa.runner.device_timer import ForwardTime
from lopa.runner.paged import PagedRunner
from lopa.types import Round


class FakeEvent:
    """A CUDA event of a made-up device."""

    now = 0.0  # its seconds

    def record(self) -> None:
        self.at = FakeEvent.now

    def elapsed_time(self, other: FakeEvent) -> float:
        return 1e3 * (other.at - self.at)


class Clocked(Eager):
    """Waits and works the longer the more rounds there have been."""

    def launch(self, batch: Batch, *args: Any) -> PendingStats:
        in_flight = super().launch(batch, *args)
        ((_, plan),) = batch.plans
        FakeEvent.now += expected(plan.index).waited
        if self.timer is not None:
            self.timer.start()
        FakeEvent.now += expected(plan.index).forward
        if self.timer is not None:
            self.timer.stop()
        return in_flight


def expected(index: int) -> ForwardTime:
    return ForwardTime(0.01 * index, 3.0 * index)


class Watched(SteadyRounds):
    def _add(self, found: Round, seconds: float, forward: ForwardTime) -> None:
        assert forward == pytest.approx(expected(found.index))
        super()._add(found, seconds, forward)


@pytest.fixture(autouse=True)
def _no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lopa.runner.device_timer._event", FakeEvent)


def test_a_time_belongs_to_the_round_that_it_is_counted_for() -> None:
    llm = LLM("dummy:dream-tiny", device="cpu")
    llm.runner = PagedRunner(llm.model, 1024, backend=Clocked)
    rounds = Watched(llm, branches=0, window=32, prefix=8)
    # Of 32 rounds, the first has the prompt, and behind the last none is launched.
    rounds.time(6)
    assert len(rounds._whole) == 30
    rounds.time(31)  # two answers
    assert len(rounds._whole) == 30 + 30 + 30
    found = rounds.result(Ceilings(1e9, 1e9))
    assert found.host_ms == pytest.approx(found.forward_ms / 300)
    assert llm.runner.backend.timer is None


@pytest.mark.parametrize("backend", [TorchBackend, Clocked])
def test_more_branches_than_there_are_places_for_is_an_error(backend: type[TorchBackend]) -> None:
    llm = LLM("dummy:dream-tiny", device="cpu")
    llm.runner = PagedRunner(llm.model, 4096, backend=backend)
    rounds = SteadyRounds(llm, branches=40, window=32, prefix=8)
    with pytest.raises(ConfigError, match="give fewer branches or a larger window"):
        rounds.time(1)


def test_without_a_device_every_forward_is_timed() -> None:
    llm = LLM("dummy:dream-tiny", device="cpu")
    rounds = SteadyRounds(llm, branches=1, window=32, prefix=8)
    rounds.time(3)
    assert len(rounds._whole) == len(rounds._forwards) == 3
    for whole, time in zip(rounds._whole, rounds._forwards, strict=True):
        assert 0 < time.forward < whole
        assert time.waited == whole - time.forward


def test_what_is_there_is_frozen_while_something_is_timed() -> None:
    def interrupted() -> None:
        with frozen():
            assert gc.get_freeze_count() > 1000
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert gc.get_freeze_count() == 0
