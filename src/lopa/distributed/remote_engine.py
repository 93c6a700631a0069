"""An engine whose rounds happen on a supervisor's ranks.

Several may share one supervisor, an open stream beside a batch say: each has its own queue and its
own limit, and each is given the events of its own sessions, whoever's `step` they came in.
"""

from __future__ import annotations

from functools import partial

from lopa.distributed.supervisor import Supervisor
from lopa.engine.base import MAX_RUNNING, TOKEN_BUDGET, Engine
from lopa.engine.engine_lock import EngineLock
from lopa.engine.output import Event
from lopa.engine.session import Session
from lopa.runner.base import check_kv_capacity


class RemoteEngine(Engine):
    idle_check_seconds = 1.0

    def __init__(
        self,
        supervisor: Supervisor,
        *,
        max_running: int = MAX_RUNNING,
        token_budget: int = TOKEN_BUDGET,  # of the ranks' rounds: the last engine's holds
        lock: EngineLock | None = None,
    ) -> None:
        super().__init__(max_running, token_budget, lock)
        self._supervisor = supervisor
        self._submitted: set[Session] = set()
        self._events: list[tuple[Session, Event]] = []  # not yet given out
        self.lock.run(partial(supervisor.set_token_budget, token_budget))

    def check(self, session: Session) -> None:
        check_kv_capacity(session.capacity, self._supervisor.capacity)

    def add(self, session: Session) -> None:
        self.check(session)
        self.lock.run(partial(self._add, session))

    def _add(self, session: Session) -> None:
        self.waiting.append(session)
        self._submit()

    def _abort(self, session: Session) -> None:
        self._supervisor.remove(session)
        self._forget(session)
        self._events = [(other, event) for other, event in self._events if other is not session]

    def close(self) -> None:
        super().close()
        self._events.clear()  # of sessions that have finished

    @property
    def busy(self) -> bool:
        return super().busy or bool(self._events)  # another engine's step may have ended a session

    @property
    def kv_pages(self) -> tuple[int, int] | None:
        return self._supervisor.kv_pages

    @property
    def ranks_alive(self) -> int:
        return self._supervisor.ranks_alive

    def check_ranks(self) -> None:
        self.lock.run(self._supervisor.check_ranks)

    def _step(self) -> list[tuple[Session, Event]]:
        """The next rounds of these sessions; waits for one."""
        while self.busy and not self._events:
            self._submit()
            self._supervisor.step()
            for session in [s for s in self.waiting if self._supervisor.is_running(s)]:
                self.waiting.remove(session)
                self.running.append(session)
        events, self._events = self._events, []
        return events

    def _submit(self) -> None:
        for session in self.waiting:
            if len(self._submitted) >= self.max_running:
                return
            if session not in self._submitted:
                self._submitted.add(session)
                self._supervisor.add(session, self._deliver)

    def _deliver(self, session: Session, event: Event) -> None:
        self._events.append((session, event))
        if event.output is not None:
            self._forget(session)

    def _forget(self, session: Session) -> None:
        self._submitted.discard(session)
        for queue in (self.waiting, self.running):
            if session in queue:
                queue.remove(session)
