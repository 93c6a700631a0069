"""Rounds that are timed: those by the host's clock have nothing to do with the device's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from ahead import Eager

from lopa import LLM
from lopa.bench.rounds import SteadyRounds
from lopa.engine.paged import PagedRunner
from lopa.engine.runner import Runner
from lopa.engine.step import Found, Step
from lopa.errors import ConfigError
from lopa.sequence import Round


class Clocked(Eager):
    """Says how long a forward took if the clock was on when it began."""

    is_timed = False
    has_read = False  # the clock was started or read since that was last set

    def begin(self, *args: Any) -> None:
        super().begin(*args)
        self.is_timed = self.timed
        self.has_read |= self.timed

    def finish(self) -> Found:
        self.forward_seconds = 0.5 if self.is_timed else None
        self.has_read |= self.is_timed
        return super().finish()


class Watched(SteadyRounds):
    def _session(self, runner: Runner) -> Iterator[tuple[Round, float]]:
        for found in super()._session(runner):
            yield found
            assert isinstance(self.llm.runner, PagedRunner)
            self.llm.runner.step.has_read = False  # type: ignore[attr-defined]

    def _add(self, found: Round, seconds: float) -> None:
        assert isinstance(self.llm.runner, PagedRunner)
        assert not self.llm.runner.step.has_read  # type: ignore[attr-defined]
        super()._add(found, seconds)


def test_the_device_s_clock_is_read_in_other_rounds() -> None:
    llm = LLM("dummy:dream-tiny", device="cpu")
    llm.runner = PagedRunner(llm.model, 1024, step=Clocked)
    rounds = Watched(llm, branches=1, window=32, prefix=8)
    rounds.time(6)
    assert len(rounds._whole) >= 6
    assert rounds._forwards
    assert {*rounds._forwards} == {0.5}
    assert not llm.runner.step.timed


@pytest.mark.parametrize("step", [Step, Clocked])
def test_more_branches_than_there_are_places_for_is_an_error(step: type[Step]) -> None:
    llm = LLM("dummy:dream-tiny", device="cpu")
    llm.runner = PagedRunner(llm.model, 4096, step=step)
    rounds = SteadyRounds(llm, branches=40, window=32, prefix=8)
    with pytest.raises(ConfigError, match="give fewer branches or a larger window"):
        rounds.time(1)


def test_without_a_device_every_forward_is_timed() -> None:
    llm = LLM("dummy:dream-tiny", device="cpu")
    rounds = SteadyRounds(llm, branches=1, window=32, prefix=8)
    rounds.time(3)
    assert len(rounds._whole) == len(rounds._forwards) == 3
    pairs = zip(rounds._whole, rounds._forwards, strict=True)
    assert all(0 < forward < whole for whole, forward in pairs)
