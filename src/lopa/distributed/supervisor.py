"""The supervisor: sessions whose rounds happen on ranks, and go on when a rank is lost.

It is no rank. From the statistics that rank 0 reports, it advances the sessions' own decoders, so
it always has the last state that anybody may have seen. When a rank is lost (`rank_group`) a new
group is forked, and the sessions go on from these decoders, their KV caches written anew
(`replay`). Callers see a pause.

Used by one thread at a time (`EngineLock`); `capacity` may be read by any.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lopa.decoding.round_cost import RoundCost
from lopa.distributed.fork_server import ForkServer
from lopa.distributed.placement import DevicePlacement
from lopa.distributed.rank_group import LostRankError, Message, RankGroup
from lopa.distributed.rank_process import RoundResult
from lopa.distributed.replay import ReplayLog
from lopa.engine.base import TOKEN_BUDGET
from lopa.engine.output import Event
from lopa.engine.session import Session
from lopa.errors import RankError
from lopa.models.checkpoint import Progress

_MAX_FAILURES = 4  # in a row, with no round between, before something else is tried
_ENDED = "the ranks have been ended: load the model again"


@dataclass(frozen=True, slots=True)
class Fault:
    """The loss of a group, and what became of it."""

    rank: int | None  # None: could not be told
    reason: str
    noticed: float  # seconds since the group last gave a sign of progress
    rebuilt: float  # seconds until the next group was ready
    ranks: int  # in that group


@dataclass(slots=True)
class _Supervised:
    """A session that the ranks have."""

    number: int
    session: Session
    deliver: Callable[[Session, Event], None]
    replay: ReplayLog = field(default_factory=ReplayLog)
    running: bool = False  # the ranks have given it a slot


class Supervisor:
    def __init__(
        self,
        model: str,
        options: dict[str, Any],  # of `LLM`, for every rank
        placements: list[DevicePlacement],  # of the ranks
        *,
        tensor_parallel: int = 1,
        backend: str = "gloo",
        timeout: float,  # seconds until a rank that says nothing counts as lost
        report: Callable[[str], None] | None = None,
        progress: Progress | None = None,  # of loading, as a model in one process has it
        fork_server: ForkServer | None = None,
    ) -> None:
        self.report = report or (lambda line: None)
        self.faults: list[Fault] = []
        self.capacity = 0  # tokens of an empty KV cache
        self.kv_pages: tuple[int, int] | None = None
        self._model, self._options, self._backend = model, options, backend
        self._placements, self._tensor_parallel = list(placements), tensor_parallel
        self._timeout = timeout
        self._token_budget = TOKEN_BUDGET
        self._sessions: dict[Session, _Supervised] = {}
        self._next_number = 0
        self._failures: list[int | None] = []  # ranks to blame since the last round
        self._cost: RoundCost | None = None  # as the ranks have reported it last
        self._cost_answers = 0
        self._fork_server, self._progress = fork_server, progress
        self.group: RankGroup | None = None
        self._closed = False
        try:
            self._start_or_retry()
        except BaseException:
            self.close()
            raise

    # -- sessions -----------------------------------------------------------------------------

    def add(self, session: Session, deliver: Callable[[Session, Event], None]) -> None:
        """Run a session; `deliver` is called with each of its events, in some `step`."""
        if self.group is None:
            raise RankError(_ENDED)
        if not self._sessions:
            self.group.forgive_silence()  # ranks say nothing while they are idle
        entry = _Supervised(self._next_number, session, deliver)
        self._next_number += 1
        self._sessions[session] = entry
        self._send_session(entry)

    def remove(self, session: Session) -> None:
        entry = self._sessions.pop(session, None)
        if entry is not None and self.group is not None:
            self.group.send("abort", entry.number)

    def is_running(self, session: Session) -> bool:
        return session in self._sessions and self._sessions[session].running

    def set_token_budget(self, tokens: int) -> None:
        if tokens != self._token_budget and self.group is not None:
            self.group.send("token_budget", tokens)
        self._token_budget = tokens

    def round_cost(self, *, anew: bool) -> RoundCost | None:
        """What a round costs on these ranks: measured, or as they have it; None: they do not."""
        answered = self._cost_answers
        asked: RankGroup | None = None
        while self._cost_answers == answered:
            try:
                if self._group is not asked:  # also where it was replaced meanwhile
                    asked = self._group
                    asked.forgive_silence()
                    asked.send("round_cost", anew)
                for message in asked.receive(busy=True):
                    self._act_on(message)
            except LostRankError as lost:
                self._rebuild(lost)
        return self._cost

    def step(self) -> None:
        """Wait a little for the ranks, and deliver what they report; replace a lost group."""
        try:
            for message in self._group.receive(busy=bool(self._sessions)):
                self._act_on(message)
        except LostRankError as lost:
            self._rebuild(lost)

    def check_ranks(self) -> None:
        """Replace the group if a rank has ended while nothing ran; `step` does so otherwise."""
        try:
            self._group.check_alive()
            for message in self._group.receive(busy=False, seconds=0):
                self._act_on(message)
        except LostRankError as lost:
            self._rebuild(lost)

    def close(self) -> None:
        """Drop every session and end every process; safe to call twice."""
        self._closed = True
        self._sessions.clear()
        self._end_group()
        if self._fork_server is not None:
            self._fork_server.close()
            self._fork_server = None

    @property
    def pids(self) -> list[int]:
        """Of the ranks, in their order."""
        return [] if self.group is None else self.group.pids

    @property
    def ranks_alive(self) -> int:
        return 0 if self.group is None else self.group.alive

    @property
    def _group(self) -> RankGroup:
        if self._closed:
            raise RankError(_ENDED)
        if self.group is None:
            raise LostRankError(None, "it has ended")
        return self.group

    # -- what the ranks report ----------------------------------------------------------------

    def _act_on(self, message: Message) -> None:
        kind, *rest = message
        if kind == "kv_pages":
            self.kv_pages = rest[0]
        elif kind == "round_cost":
            (self._cost,) = rest
            self._cost_answers += 1
        elif kind == "round":
            results, running = rest
            self._failures.clear()
            by_number = {entry.number: entry for entry in self._sessions.values()}
            for number in running:
                if number in by_number:
                    by_number[number].running = True
            for result in results:
                if result.session in by_number:  # else it was removed meanwhile
                    self._advance(by_number[result.session], result)

    def _advance(self, entry: _Supervised, result: RoundResult) -> None:
        session = entry.session
        if session.decoder.round == 0 and result.start:  # a prompt that was cached already
            session.decoder.reuse(result.start)
            entry.replay.begin(session.trace.prompt_ids[: result.start], session.decoder)
        session.decoder.take(result.branches)
        plan = session.plan()
        if (
            plan is None
            or plan.index != result.index
            or plan.wanted.sum() != len(result.stats.token)
        ):
            raise LostRankError(0, "its decoder state differs from the supervisor's")
        winner = session.choose(result.stats)
        entry.replay.add(plan, winner)
        event = session.record(result.seconds)
        if event.output is not None:
            del self._sessions[session]
        entry.deliver(session, event)

    # -- the group ----------------------------------------------------------------------------

    def _send_session(self, entry: _Supervised) -> None:
        replay = tuple(entry.replay.plans)
        self._group.send("add", entry.number, entry.session.decoder, replay)

    def _rebuild(self, lost: LostRankError) -> None:
        """End what is left, start anew, and go on with the sessions as they are here."""
        noticed = time.monotonic()
        rank, reason = lost.rank, lost.reason
        silence = 0.0 if self.group is None else self.group.silence
        if rank is None and (rank := self._blame()) is not None:
            reason = "it is gone"
        name = "a rank" if rank is None else f"rank {rank}"
        self.report(f"{name} was lost ({reason}): the group is rebuilt")
        self._failures.append(rank)
        self._start_or_retry()
        took, ranks = time.monotonic() - noticed, len(self._placements)
        self.faults.append(Fault(rank, reason, silence, took, ranks))
        self.report(f"the group of {ranks} goes on after {took:.1f} s")

    def _blame(self) -> int | None:
        return None if self.group is None else self.group.blame()

    def _start_or_retry(self) -> None:
        while True:
            self._end_group()
            if len(self._failures) >= _MAX_FAILURES:
                self._drop_replica()
            try:
                self._start()
                return
            except LostRankError as lost:
                self.report(f"a group could not start ({lost.reason})")
                self._failures.append(lost.rank)

    def _drop_replica(self) -> None:
        """The same rank failed again and again: go on without its replica, if there are others."""
        rank = self._failures[-1]
        same = rank is not None and self._failures.count(rank) == len(self._failures)
        if not same or len(self._placements) == self._tensor_parallel:
            raise RankError(
                f"the group failed {len(self._failures)} times without finishing a round: see the "
                "messages above; a round that takes longer needs a larger --rank-timeout"
            )
        assert rank is not None
        first = rank // self._tensor_parallel * self._tensor_parallel
        del self._placements[first : first + self._tensor_parallel]
        self._failures.clear()
        self.report(f"rank {rank} fails again and again: {len(self._placements)} ranks are left")

    def _start(self) -> None:
        if self._fork_server is None or not self._fork_server.is_alive:
            if self._fork_server is not None:
                self._fork_server.close()
            self._fork_server = ForkServer()
        self.group = RankGroup(
            self._fork_server,
            self._model,
            self._options,
            self._placements,
            tensor_parallel=self._tensor_parallel,
            backend=self._backend,
            timeout=self._timeout,
            progress=self._progress,
        )
        self._progress = None  # later groups load while requests wait
        self.capacity = self.group.capacity
        self.group.send("token_budget", self._token_budget)
        for entry in sorted(self._sessions.values(), key=lambda e: (not e.running, e.number)):
            self._send_session(entry)

    def _end_group(self) -> None:
        if self.group is not None:
            self.group.close()
        self.group = None
