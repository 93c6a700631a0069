"""`lopa bench round`: the time of a whole round, decoder and host included, against its floor."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

from lopa.bench.ceilings import Ceilings
from lopa.bench.round_work import RoundWork, TouchedExperts
from lopa.distributed.rank_llm import RankLLM
from lopa.engine.cost_measurement import steady_session
from lopa.engine.llm import LLM
from lopa.engine.scheduler import Scheduler
from lopa.errors import ConfigError
from lopa.runner.backend_torch import TorchBackend
from lopa.runner.base import InFlight, Plans, Runner
from lopa.runner.device_timer import DeviceTimer, ForwardTime
from lopa.runner.paged import PagedRunner
from lopa.types import Round, Stats

BLOCK = 32  # of the rounds that are timed


@dataclass(frozen=True, slots=True)
class RoundTime:
    branches: int
    window: int
    prefix: int
    tokens: int  # rows · window
    masks: float  # median: positions whose statistics were asked for, which the head is for
    rounds: int  # how many were timed
    round_ms: float  # median: plan, forward, selection, commit
    forward_ms: float  # median: the forward alone; on a GPU by the device's own clock
    host_ms: float  # median: the rest of the round; on a GPU what the device waits between forwards
    floor_ms: float
    ratio: float  # round / floor
    gigabytes_per_second: float  # what the floor counts, over the round's time
    teraflops: float
    touched_experts: float | None  # median of the experts of a layer that a round reads


class _Timed:
    """A runner that keeps the time of its forwards."""

    is_async = False

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.seconds: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)

    def launch(self, plans: Plans, lane: int) -> InFlight:
        return InFlight(partial(self.forward, plans))

    def forward(self, plans: Plans) -> Sequence[Stats | None]:
        began = time.perf_counter()
        found = self.runner.forward(plans)
        self.seconds.append(time.perf_counter() - began)
        return found


class SteadyRounds:
    """Rounds of `branches` + 1 rows of `window` tokens behind a cached prefix."""

    def __init__(self, llm: LLM | RankLLM, *, branches: int, window: int, prefix: int) -> None:
        if window % BLOCK or window < BLOCK:
            raise ConfigError(f"window {window} is not a multiple of the block of {BLOCK}")
        self.llm, self.branches, self.window, self.prefix = llm, branches, window, prefix
        self._whole: list[float] = []
        self._forwards: list[ForwardTime] = []
        self._masks: list[int] = []
        self._touched: list[float] = []

    def time(self, rounds: int) -> None:
        """So many more, by the host's clock, and of each what the forward took of it."""
        runner = self.llm.runner
        backend = runner.backend if isinstance(runner, PagedRunner) else None
        if not self._whole and ((backend and backend.is_async) or self.llm.config.mixture):
            self._warm_up(runner, backend)
        if backend is None or not backend.is_async:
            self._time_each(_Timed(runner), rounds)
            return
        backend.timer = DeviceTimer()
        try:
            self._time_ahead(runner, backend.timer, rounds)
        finally:
            backend.timer = None

    def _warm_up(self, runner: Any, backend: TorchBackend | None) -> None:
        """An answer that is not timed: graphs are captured, and touched experts counted."""
        touched = TouchedExperts(self.llm.model, backend)
        try:
            for found, _ in self._session(runner):
                if self._is_full(found) and (count := touched.take()) is not None:
                    self._touched.append(count)
        finally:
            touched.close()

    def _time_each(self, timed: _Timed, rounds: int) -> None:
        """One round after another."""
        wanted = len(self._whole) + rounds
        while len(self._whole) < wanted:
            before = len(self._whole)
            for found, seconds in self._session(timed):
                if self._is_full(found):
                    forward = timed.seconds[-1]
                    self._add(found, seconds, ForwardTime(seconds - forward, forward))
                if len(self._whole) == wanted:
                    break
            self._check_more_than(before)

    def _time_ahead(self, runner: Runner, timer: DeviceTimer, rounds: int) -> None:
        """Each is begun before the one before it is recorded. Whole answers: their heads differ."""
        wanted = len(self._whole) + rounds
        while len(self._whole) < wanted:
            before = len(self._whole)
            for found, seconds in self._session(runner):
                forward = timer.take()  # None: no other round was launched behind this one
                if forward is not None and self._is_full(found):
                    self._add(found, seconds, forward)
            self._check_more_than(before)

    def _check_more_than(self, before: int) -> None:
        """An answer with nothing to time would be followed by others like it, for ever."""
        if len(self._whole) == before:
            raise ConfigError(
                f"a window of {self.window} tokens has too few rounds with {self.branches} "
                "branches to be timed: give fewer branches or a larger window"
            )

    def _is_full(self, found: Round) -> bool:
        """Whether it has all the branches and the whole window."""
        is_full = found.branches[-1].end - found.start == self.window
        return is_full and len(found.branches) == self.branches + 1

    def _add(self, found: Round, seconds: float, forward: ForwardTime) -> None:
        self._whole.append(seconds)
        self._forwards.append(forward)
        self._masks.append(sum(branch.masks for branch in found.branches))

    def _session(self, runner: Any) -> Iterator[tuple[Round, float]]:
        """The rounds of an answer behind its prompt, each with its seconds."""
        llm, shape = self.llm, (self.branches, self.window, self.prefix)
        session = steady_session(llm.config, llm.decode_config, *shape, block_size=BLOCK)
        ended = time.perf_counter()
        with closing(Scheduler(runner, max_running=1)) as engine:
            for event in engine.stream(session):
                # From one step's end to the next: a round, whatever of it goes on meanwhile.
                began, ended = ended, time.perf_counter()
                if event.round.start >= self.prefix:
                    yield event.round, ended - began

    def result(self, ceilings: Ceilings) -> RoundTime:
        """Medians of all that were timed."""
        llm = self.llm
        tokens = (self.branches + 1) * self.window
        median = statistics.median(self._whole)
        touched = statistics.median(self._touched) if self._touched else None
        work = RoundWork.of(
            llm.config,
            llm.dtype,
            rows=self.branches + 1,
            window=self.window,
            prefix=self.prefix,
            touched=touched,
            is_quantised=ceilings.quantised_flops_per_second is not None,
        )
        floor = ceilings.floor(work)
        host, forward = map(statistics.median, zip(*self._forwards, strict=True))
        return RoundTime(
            branches=self.branches,
            window=self.window,
            prefix=self.prefix,
            tokens=tokens,
            masks=statistics.median(self._masks),
            rounds=len(self._whole),
            round_ms=1e3 * median,
            forward_ms=1e3 * forward,
            host_ms=1e3 * host,
            floor_ms=1e3 * floor,
            ratio=median / floor,
            gigabytes_per_second=work.bytes / median / 1e9,
            teraflops=(work.flops + work.quantised_flops) / median / 1e12,
            touched_experts=touched,
        )
