"""`lopa bench round`: the time of a whole round, decoder and host included, against its floor."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lopa.bench.ceilings import Ceilings
from lopa.engine.calibration import steady_session
from lopa.engine.llm import LLM
from lopa.engine.paged import PagedRunner
from lopa.engine.runner import Runner
from lopa.engine.step import Step
from lopa.errors import ConfigError
from lopa.sequence import Plan, Round, Stats

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
    host_ms: float  # the rest of the round
    floor_ms: float
    ratio: float  # round / floor
    gigabytes_per_second: float  # weights over the round's time
    teraflops: float


class _Timed:
    """A runner that keeps the time of its forwards."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.seconds: list[float] = []
        self.check, self.open, self.close = runner.check, runner.open, runner.close
        self.reused, self.cost, self.commit = runner.reused, runner.cost, runner.commit
        self.begin = runner.begin

    def forward(self, plans: Sequence[tuple[int, Plan]]) -> Sequence[Stats | None]:
        began = time.perf_counter()
        found = self.runner.forward(plans)
        seconds = time.perf_counter() - began
        self.seconds.append(seconds)
        return found


class SteadyRounds:
    """Rounds of `branches` + 1 rows of `window` tokens behind a cached prefix."""

    def __init__(self, llm: LLM, *, branches: int, window: int, prefix: int) -> None:
        if window % BLOCK or window < BLOCK:
            raise ConfigError(f"window {window} is not a multiple of the block of {BLOCK}")
        self.llm, self.branches, self.window, self.prefix = llm, branches, window, prefix
        self._whole: list[float] = []
        self._forwards: list[float] = []
        self._masks: list[int] = []

    def time(self, rounds: int) -> None:
        """So many more, by the host's clock; of them, or of some in between, the forward alone."""
        runner = self.llm.runner
        step = runner.step if isinstance(runner, PagedRunner) else None
        if step is None or not step.works_alone:
            self._time_each(_Timed(runner), rounds)
            return
        if not self._whole:
            for _ in self._session(runner):  # every graph is captured before any is timed
                pass
        try:
            self._time_by_turns(runner, step, rounds)
        finally:
            step.timed = False

    def _time_each(self, timed: _Timed, rounds: int) -> None:
        """The forward of every round."""
        wanted = len(self._whole) + rounds
        while len(self._whole) < wanted:
            before = len(self._whole)
            for found, seconds in self._session(timed):
                if self._is_full(found) and len(self._whole) < wanted:
                    self._add(found, seconds)
                    self._forwards.append(timed.seconds[-1])
            self._check_more_than(before, len(self._whole))

    def _time_by_turns(self, runner: Runner, step: Step, rounds: int) -> None:
        """Of every four rounds, one by the device's clock, which takes the host's time to read.

        So the round before it is not counted either: the clock is started in it.
        """
        wanted = len(self._whole) + rounds
        while len(self._whole) < wanted:
            before = len(self._forwards)
            step.timed = False
            for number, (found, seconds) in enumerate(self._session(runner)):
                turn = number % 4
                step.timed = turn == 2  # so the step that follows begins a round that is
                if not self._is_full(found):
                    continue
                if turn == 0 and step.forward_seconds is not None:
                    self._forwards.append(step.forward_seconds)
                elif turn in (1, 2):
                    self._add(found, seconds)
            self._check_more_than(before, len(self._forwards))

    def _check_more_than(self, before: int, now: int) -> None:
        """An answer with nothing to time would be followed by others like it, for ever."""
        if now == before:
            raise ConfigError(
                f"a window of {self.window} tokens has too few rounds with {self.branches} "
                "branches to be timed: give fewer branches or a larger window"
            )

    def _is_full(self, found: Round) -> bool:
        """Whether it has all the branches and the whole window."""
        is_full = found.branches[-1].end - found.start == self.window
        return is_full and len(found.branches) == self.branches + 1

    def _add(self, found: Round, seconds: float) -> None:
        self._whole.append(seconds)
        self._masks.append(sum(branch.masks for branch in found.branches))

    def _session(self, runner: Runner) -> Iterator[tuple[Round, float]]:
        """The rounds of an answer behind its prompt, each with its seconds."""
        llm, shape = self.llm, (self.branches, self.window, self.prefix)
        session = steady_session(runner, llm.config, llm.decode_config, *shape, block_size=BLOCK)
        ended = time.perf_counter()
        try:
            while (event := session.step(ahead=True)) is not None:
                # From one step's end to the next: a round, whatever of it goes on meanwhile.
                began, ended = ended, time.perf_counter()
                if event.round.start >= self.prefix:
                    yield event.round, ended - began
        finally:
            session.close()

    def result(self, ceilings: Ceilings) -> RoundTime:
        """Medians of all that were timed."""
        llm = self.llm
        tokens = (self.branches + 1) * self.window
        median = statistics.median(self._whole)
        floor = ceilings.floor(llm.config, tokens, llm.dtype)
        weights = llm.config.parameters - llm.config.vocab_size * llm.config.hidden_size
        size = sum(p.numel() * p.itemsize for p in llm.model.parameters())
        size -= llm.model.embedding.weight.nbytes if not llm.config.tied_head else 0
        forward = statistics.median(self._forwards)
        return RoundTime(
            branches=self.branches,
            window=self.window,
            prefix=self.prefix,
            tokens=tokens,
            masks=statistics.median(self._masks),
            rounds=len(self._whole),
            round_ms=1e3 * median,
            forward_ms=1e3 * forward,
            host_ms=1e3 * (median - forward),
            floor_ms=1e3 * floor,
            ratio=median / floor,
            gigabytes_per_second=size / median / 1e9,
            teraflops=2 * weights * tokens / median / 1e12,
        )
