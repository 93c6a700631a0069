"""The supervisor: an engine whose rounds happen in other processes, and go on when one is lost.

It is no rank. It holds the sessions: from the statistics that rank 0 tells, it advances a decoder
of its own, so it always has the last state that anybody may have seen. A rank that is gone, silent,
or too long at one thing costs the group: all its processes are ended, a new group is forked, and
the sessions go on from the supervisor's decoders, their caches written anew (see `history`).
Callers see a pause. Ending every process is deliberate: no collective has to be left in order.

Used by one thread, the one that made it; `room` may be read by any.
"""

from __future__ import annotations

import os
import select
import selectors
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from lopa.decoding.decoder import Decoder
from lopa.distributed.channel import Channel
from lopa.distributed.fork_server import Nursery
from lopa.distributed.mesh import meeting_place
from lopa.distributed.placement import Place
from lopa.distributed.rank_process import Told
from lopa.distributed.replay import History
from lopa.engine.scheduler import MAX_RUNNING, TOKEN_BUDGET, Engine
from lopa.engine.session import Event, Session
from lopa.errors import RankError
from lopa.runner.base import check_capacity

_TRIES = 4  # failures in a row, with no round between, before something else is tried
_LOADING = 6.0  # while a model is read a rank may be silent for so many timeouts
_BLAME = 0.25  # seconds in which the rank to blame may turn out


@dataclass(frozen=True, slots=True)
class Fault:
    """The loss of a group, and what became of it."""

    rank: int | None  # None: could not be told
    reason: str
    noticed: float  # seconds since the group last gave a sign of progress
    rebuilt: float  # seconds until the next group was ready
    ranks: int  # in that group


class _LostError(Exception):
    def __init__(self, rank: int | None, reason: str) -> None:
        super().__init__(reason)
        self.rank, self.reason = rank, reason


@dataclass(slots=True)
class _Process:
    rank: int
    pid: int
    handle: int  # a pidfd where there is one, else -1
    channel: Channel
    heard: float = field(default_factory=time.monotonic)
    phase: str = "starting"
    ready: bool = False

    @property
    def runs(self) -> bool:
        if self.handle >= 0:  # readable when it has ended
            poll = select.poll()
            poll.register(self.handle, select.POLLIN)
            return not poll.poll(0)
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def end(self) -> None:
        with suppress(ProcessLookupError):
            if self.handle >= 0:
                signal.pidfd_send_signal(self.handle, signal.SIGKILL)
            else:
                os.kill(self.pid, signal.SIGKILL)
        self.channel.close()

    def wait(self) -> None:
        """Until it is really gone: only then is its memory free."""
        if self.handle >= 0:
            with selectors.DefaultSelector() as selector:
                selector.register(self.handle, selectors.EVENT_READ)
                selector.select(10.0)
            os.close(self.handle)
            self.handle = -1
            return
        with suppress(ProcessLookupError):
            for _ in range(1000):
                os.kill(self.pid, 0)
                time.sleep(0.01)


class Supervisor(Engine):
    """The interface of `Engine`: add sessions, step, abort, close. `end` ends its processes."""

    def __init__(
        self,
        model: str,
        options: dict[str, Any],  # of the model, for every rank
        ranks: list[Place],
        *,
        tensors: int = 1,
        backend: str = "gloo",
        timeout: float = 10.0,
        report: Callable[[str], None] | None = None,
        nursery: Nursery | None = None,  # where somebody has made one already
    ) -> None:
        self.max_running, self.token_budget = MAX_RUNNING, TOKEN_BUDGET
        self.waiting: deque[Session] = deque()
        self.running: deque[Session] = deque()
        self.faults: list[Fault] = []
        self.rounds = 0
        self._model, self._options = model, options
        self._ranks, self._tensors = list(ranks), tensors
        self._backend, self._timeout = backend, timeout
        self.report = report or (lambda line: None)
        self._sessions: dict[int, Session] = {}  # by number
        self._numbers: dict[int, int] = {}  # by id(session)
        self._histories: dict[int, History] = {}
        self._next = 0
        self._told: deque[tuple[list[Told], list[int]]] = deque()
        self.capacity = 0  # tokens of the whole cache: the same on every rank
        self.pages: tuple[int, int] | None = None  # of the cache: held, and in all
        self._processes: list[_Process] = []
        self._failures: list[int | None] = []  # ranks to blame since the last round
        self._proven = False  # this group has finished a round
        self._listened = time.monotonic()
        self._nursery = nursery
        self._store: Any = None
        try:
            self._start_or_retry()
        except BaseException:
            self.end()
            raise

    # -- the engine's interface ---------------------------------------------------------------

    def limit(self, max_running: int, token_budget: int) -> None:
        Engine.__init__(self, None, max_running=max_running, token_budget=token_budget)  # type: ignore[arg-type]
        self._tell("limits", max_running, token_budget)

    def add(self, session: Session) -> None:
        check_capacity(session.capacity, self.capacity)
        if not self.busy:  # ranks say nothing while they are idle
            self._hear_afresh()
        number = self._next
        self._next += 1
        self._sessions[number], self._numbers[id(session)] = session, number
        self._histories[number] = History()
        self.waiting.append(session)
        prompt, config = session.trace.prompt_ids, session.config
        self._tell("add", number, prompt, config, session.limit, None, ())

    def abort(self, session: Session) -> None:
        number = self._numbers.get(id(session))
        if number is not None:
            self._forget(number)
            self._tell("abort", number)
        session.close()

    def step(self) -> list[tuple[Session, Event]]:
        """The next round that happened; waits for it."""
        while self.busy:
            try:
                if not self._told:
                    self._listen(self._timeout / 20)
                    continue
                return self._take(*self._told.popleft())
            except _LostError as lost:
                self._rebuild(lost)
        return []

    def tend(self) -> None:
        """Replace the group if a rank has ended while nothing ran; `step` sees to it otherwise."""
        gone = [process.rank for process in self._processes if not process.runs]
        try:
            if gone:
                raise _LostError(gone[0], "it is gone")
            self._listen(0)
        except _LostError as lost:
            self._rebuild(lost)

    def end(self) -> None:
        """Drop every session and end every process; safe to call twice."""
        for session in list(self._sessions.values()):
            self._forget(self._numbers[id(session)])
            session.close()
        self._end_processes()
        if self._nursery is not None:
            self._nursery.close()
            self._nursery = None

    @property
    def pids(self) -> list[int]:
        """Of the ranks, in their order."""
        return [process.pid for process in self._processes]

    @property
    def alive(self) -> int:
        """Ranks that are up."""
        return sum(process.ready and process.runs for process in self._processes)

    @property
    def branches(self) -> int:
        return len(self._ranks) // self._tensors

    # -- rounds -------------------------------------------------------------------------------

    def _take(self, told: list[Told], running: list[int]) -> list[tuple[Session, Event]]:
        self.rounds += 1
        self._failures.clear()
        events = []
        for one in told:
            session = self._sessions.get(one.session)
            if session is None:
                continue  # aborted meanwhile
            if not session.trace.rounds and one.start and session.decoder.round == 0:
                session.decoder.reuse(one.start)  # a prompt whose cache was there already
                prompt = session.trace.prompt_ids[: one.start]
                self._histories[one.session].begin(prompt, session.decoder)
            plan = session.plan()
            if plan is None or plan.index != one.index or plan.wanted.sum() != len(one.token):
                raise _LostError(0, "it computes something else than the supervisor")
            winner = session.choose(one.stats(plan))
            self._histories[one.session].add(plan, winner)
            event = session.take(one.seconds)
            if event.output is not None:
                self._forget(one.session)
            events.append((session, event))
        runs = {id(s) for n in running if (s := self._sessions.get(n)) is not None}
        for session in [s for s in self.waiting if id(s) in runs]:
            self.waiting.remove(session)
            self.running.append(session)
        return events

    def _forget(self, number: int) -> None:
        session = self._sessions.pop(number)
        del self._numbers[id(session)], self._histories[number]
        for line in (self.waiting, self.running):
            with suppress(ValueError):
                line.remove(session)

    def _tell(self, *command: Any) -> None:
        """The same to every rank. A rank that cannot hear is found out in the next step."""
        for process in self._processes:
            with suppress(_LostError):
                self._send(process, *command)

    def _send(self, process: _Process, *message: Any) -> None:
        try:
            process.channel.send(*message)
        except OSError:
            raise _LostError(process.rank, "it is gone") from None

    # -- watching -----------------------------------------------------------------------------

    def _listen(self, seconds: float) -> None:
        """Wait so long for a sign of life from any rank, and take in what it says."""
        if not self._processes:
            raise _LostError(None, "it has ended")
        if time.monotonic() - self._listened > self._timeout / 4:  # what is there counts as fresh
            self._hear_afresh()
        self._listened = time.monotonic()
        for process in self._readable(seconds):
            try:
                messages = process.channel.waiting()
            except (EOFError, OSError):
                raise _LostError(process.rank, "it is gone") from None
            process.heard = time.monotonic()
            for message in messages:
                self._hear(process, message)
        self._find_silent()

    def _hear_afresh(self) -> None:
        for process in self._processes:
            process.heard = time.monotonic()

    def _readable(self, seconds: float) -> Iterator[_Process]:
        with selectors.DefaultSelector() as selector:
            for process in self._processes:
                selector.register(process.channel, selectors.EVENT_READ, process)
            for key, _ in selector.select(seconds):
                yield key.data

    def _hear(self, process: _Process, message: tuple[Any, ...]) -> None:
        kind, *rest = message
        if kind == "beat":
            process.phase, seconds = rest
            # Reading the weights takes long, and so may a first forward, which compiles kernels.
            limit = self._timeout * (1.0 if self._proven else _LOADING)
            # Waiting for the others is no fault of its own, unless it never ends.
            late = 0.8 * limit if process.phase != "waiting" else 1.5 * limit
            if process.phase != "idle" and seconds > late:
                at = f"it has been at {process.phase} for {seconds:.1f} s"
                raise _LostError(process.rank, at)
        elif kind == "round":
            self._told.append((rest[0], rest[1]))
            self._proven = True
        elif kind == "ready":
            process.ready, process.phase = True, "idle"
            self.capacity = rest[0]
        elif kind == "pages":
            self.pages = rest[0]
        elif kind == "error":  # of the request or the model: another group would fail likewise
            self._end_processes()
            raise rest[0]
        elif kind == "failed":
            raise _LostError(process.rank, rest[0])
        elif kind == "lost":  # because of another
            raise _LostError(None, rest[0])

    def _find_silent(self) -> None:
        now = time.monotonic()
        for process in self._processes:
            limit = 0.8 * self._timeout * (1.0 if process.ready else _LOADING)
            silent = now - process.heard
            if (self.busy or not process.ready) and silent > limit:
                raise _LostError(process.rank, f"it has been silent for {silent:.1f} s")

    # -- the group ----------------------------------------------------------------------------

    def _rebuild(self, lost: _LostError) -> None:
        """End what is left, start anew, and take the sessions up where they are here."""
        noticed = time.monotonic()
        rank, reason = lost.rank, lost.reason
        silent = max((noticed - p.heard for p in self._processes), default=0.0)
        if rank is None and (rank := self._to_blame()) is not None:
            reason = "it is gone"
        name = "a rank" if rank is None else f"rank {rank}"
        self.report(f"{name} was lost ({reason}): the group is rebuilt")
        self._failures.append(rank)
        self._start_or_retry()
        took = time.monotonic() - noticed
        self.faults.append(Fault(rank, reason, silent, took, len(self._ranks)))
        self.report(f"the group of {len(self._ranks)} goes on after {took:.1f} s")

    def _to_blame(self) -> int | None:
        """The others fail because one did: that one's channel ends, or it says nothing."""
        until = time.monotonic() + _BLAME
        while (left := until - time.monotonic()) > 0:
            for process in self._readable(left):
                try:
                    process.channel.waiting()
                except (EOFError, OSError):
                    return process.rank
        return None

    def _start_or_retry(self) -> None:
        while True:
            self._end_processes()
            if len(self._failures) >= _TRIES:
                self._do_with_less()
            try:
                self._start()
                return
            except _LostError as lost:
                rank = lost.rank if lost.rank is not None else self._to_blame()
                self.report(f"a group could not start ({lost.reason})")
                self._failures.append(rank)

    def _do_with_less(self) -> None:
        """The same rank failed again and again: go on without its replica, if there are others."""
        rank = self._failures[-1]
        same = rank is not None and self._failures.count(rank) == len(self._failures)
        if not same or self.branches == 1:
            raise RankError(
                f"the group failed {len(self._failures)} times without finishing a round: see the "
                "messages above; a round that takes longer needs a larger --rank-timeout"
            )
        assert rank is not None
        first = rank // self._tensors * self._tensors
        del self._ranks[first : first + self._tensors]
        self._failures.clear()
        self.report(f"rank {rank} fails again and again: {len(self._ranks)} ranks are left")

    def _start(self) -> None:
        if self._nursery is None or self._nursery.process.poll() is not None:
            if self._nursery is not None:
                self._nursery.close()
            self._nursery = Nursery(self._tensors > 1)
        self._proven = False
        self._store = meeting_place("127.0.0.1", 0, is_master=True)
        common = {
            "model": self._model,
            "options": self._options,
            "branches": self.branches,
            "tensors": self._tensors,
            "backend": self._backend,
            "port": self._store.port,
            "timeout": 2 * self._timeout,  # of collectives: the supervisor is to notice first
            "period": self._timeout / 20,
        }
        for number, place in enumerate(self._ranks):
            here, there = socket.socketpair()
            orders = {
                **common,
                "rank": number,
                "place": place,
            }
            with there:
                try:
                    pid = self._nursery.fork(orders, there)
                except (EOFError, OSError):
                    here.close()
                    raise _LostError(None, "the nursery is gone") from None
            self._processes.append(_Process(number, pid, _handle(pid), Channel(here)))
        while not all(process.ready for process in self._processes):
            self._listen(self._timeout / 20)
        self._tell("limits", self.max_running, self.token_budget)
        for session in [*self.running, *self.waiting]:
            number = self._numbers[id(session)]
            decoder: Decoder | None = session.decoder if session.trace.rounds else None
            self._tell(
                "add",
                number,
                session.trace.prompt_ids,
                session.config,
                session.limit,
                decoder,
                tuple(self._histories[number].plans),
            )

    def _end_processes(self) -> None:
        for process in self._processes:
            process.end()
        for process in self._processes:
            process.wait()
        self._processes.clear()
        self._told.clear()
        self._store = None


def _handle(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return -1
