"""`Engine`: what drives sessions, round by round.

`lopa.engine.scheduler.Scheduler` does it on a runner of this process,
`lopa.distributed.remote_engine.RemoteEngine` on ranks in other processes. An engine knows nothing
of text or of the network: whoever drives it adds sessions, calls `step` and hands the events on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from functools import partial

from lopa.engine.engine_lock import EngineLock
from lopa.engine.output import Event
from lopa.engine.session import Session
from lopa.errors import ConfigError

MAX_RUNNING = 32
TOKEN_BUDGET = 8192


class Engine(ABC):
    """One loop owns it.

    Engines of one model share a lock: threads that drive one each take turns, round by round.
    """

    def __init__(
        self,
        max_running: int = MAX_RUNNING,  # sessions that hold a slot at once
        token_budget: int = TOKEN_BUDGET,  # tokens forwarded in a round
        lock: EngineLock | None = None,  # of the model, where it has several engines
    ) -> None:
        if max_running < 1:
            raise ConfigError(f"max_running must be at least 1: got {max_running}")
        if token_budget < 1:
            raise ConfigError(f"token_budget must be at least 1: got {token_budget}")
        self.max_running = max_running
        self.token_budget = token_budget
        self.lock = lock or EngineLock()
        self.waiting: deque[Session] = deque()
        self.running: deque[Session] = deque()

    @abstractmethod
    def check(self, session: Session) -> None:
        """Refuse a session that not even an empty cache could hold."""

    @abstractmethod
    def add(self, session: Session) -> None:
        """Queue a session."""

    def abort(self, session: Session) -> None:
        """Drop a session wherever it is; its slot is free before the next round.

        Safe to call twice.
        """
        self.lock.run_between_rounds(partial(self._abort, session))

    @abstractmethod
    def _abort(self, session: Session) -> None: ...

    def step(self) -> list[tuple[Session, Event]]:
        """One round: an event for each session that took part. Finished ones have left."""
        return self.lock.run(self._step)

    @abstractmethod
    def _step(self) -> list[tuple[Session, Event]]: ...

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    @abstractmethod
    def kv_pages(self) -> tuple[int, int] | None:
        """Pages of the KV cache in use, and in all; None where that is not known."""

    @property
    def ranks_alive(self) -> int:
        """Processes that forward."""
        return 1

    idle_check_seconds: float | None = None  # between calls of `check_ranks` while nothing runs

    def check_ranks(self) -> None:  # noqa: B027 (an engine in this process has none)
        """Replace ranks that were lost while nothing ran."""

    def run(self, sessions: Iterator[Session]) -> Iterator[Session]:
        """Run sessions to their end, in order of completion.

        Sessions are taken from the iterator only as they are needed. On the way out every slot is
        freed.
        """
        try:
            while True:
                while len(self.waiting) < self.max_running:
                    session = next(sessions, None)
                    if session is None:
                        break
                    self.add(session)
                if not self.busy:
                    return
                for session, event in self.step():
                    if event.output is not None:
                        yield session
        finally:
            self.close()

    def stream(self, session: Session) -> Iterator[Event]:
        """Run one session; its events as they happen."""
        self.add(session)
        try:
            while True:
                events = self.step()
                for event in (event for other, event in events if other is session):
                    yield event
                    if event.output is not None:
                        return
                if not events and not self.busy:  # it was aborted
                    return
        finally:
            self.abort(session)

    def close(self) -> None:
        """Drop every session."""
        for session in [*self.waiting, *self.running]:
            self.abort(session)
