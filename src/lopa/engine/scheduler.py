"""The engine: many sessions on one runner, each round in one forward (continuous batching).

Sessions wait in line and are taken up in their order as soon as the runner has room for them. A
round takes as many running sessions as its token budget allows, in turn, so that none is left
behind; a session that could not go this time goes first the next time. It knows nothing of text or
of the network: whoever drives it adds sessions, calls `step` and hands the events on.

Where the device works by itself, the next round is begun before the records of the last one are
made, and before whoever drives the engine reads them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator

from lopa.engine.session import Event, Session
from lopa.errors import ConfigError
from lopa.runner.base import Runner
from lopa.types import Plan

MAX_RUNNING = 32
TOKEN_BUDGET = 8192


class Engine:
    """Not thread-safe: one loop owns it."""

    def __init__(
        self,
        runner: Runner,
        *,
        max_running: int = MAX_RUNNING,  # sessions that hold a slot at once
        token_budget: int = TOKEN_BUDGET,  # tokens forwarded in a round
    ) -> None:
        if max_running < 1:
            raise ConfigError(f"max_running must be at least 1: got {max_running}")
        if token_budget < 1:
            raise ConfigError(f"token_budget must be at least 1: got {token_budget}")
        self.runner = runner
        self.max_running = max_running
        self.token_budget = token_budget
        self.waiting: deque[Session] = deque()
        self.running: deque[Session] = deque()  # whose turn it is, first
        self._began: dict[Session, float] = {}  # when its round was first forwarded
        self._begun: list[tuple[Session, Plan]] = []  # the next turn, where it is under way

    def add(self, session: Session) -> None:
        """Wait in line. A session that the runner can never hold is refused here."""
        self.runner.check(session.capacity)
        self.waiting.append(session)

    def abort(self, session: Session) -> None:
        """Drop a session wherever it is; its slot is free at once."""
        for line in (self.waiting, self.running):
            if session in line:
                line.remove(session)
        if any(one is session for one, _ in self._begun):
            self._begun = []  # what was begun with it is done again without it
        self._began.pop(session, None)
        session.close()

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def step(self) -> list[tuple[Session, Event]]:
        """One round: what became of each session that went. Finished ones have left."""
        turn = self._begun or self._next_turn()
        if not turn:
            return []
        self._begun = []
        began = time.perf_counter()
        for session, _ in turn:
            self._began.setdefault(session, began)
        found = self.runner.forward([(session.slot, plan) for session, plan in turn])
        if len(turn) < len(self.running):
            for session, _ in turn:  # to the end of the line
                self.running.remove(session)
                self.running.append(session)
        # A long prompt takes several forwards: None until it is through.
        done = [(s, stats) for (s, _), stats in zip(turn, found, strict=True) if stats is not None]
        self.runner.commit([(session.slot, session.choose(stats)) for session, stats in done])
        ended = time.perf_counter()
        spent = {session: ended - self._began.pop(session) for session, _ in done}
        for session in spent:
            if session.plan() is None:
                self.running.remove(session)
                session.close()  # its room is for the next one
        self._begin(ended)
        return [(session, session.take(seconds)) for session, seconds in spent.items()]

    def run(self, sessions: Iterator[Session]) -> Iterator[Session]:
        """Run sessions to their end, in order of completion; few are made before their time.

        On the way out every slot is freed.
        """
        try:
            while True:
                while len(self.waiting) < self.max_running:  # so that none of its places is empty
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

    def close(self) -> None:
        """Drop every session."""
        for session in [*self.waiting, *self.running]:
            self.abort(session)

    def _admit(self) -> None:
        new: list[Session] = []
        while self.waiting and len(self.running) + len(new) < self.max_running:
            if not self.waiting[0].open():
                break  # no room until another has finished
            new.append(self.waiting.popleft())
        # New ones go first, in their order: their first round is what their users wait for.
        self.running.extendleft(reversed(new))

    def _begin(self, now: float) -> None:
        """The next round, where the device can have it at once."""
        turn = self._next_turn()
        if turn and self.runner.begin([(session.slot, plan) for session, plan in turn]):
            self._begun = turn
            for session, _ in turn:
                self._began.setdefault(session, now)

    def _next_turn(self) -> list[tuple[Session, Plan]]:
        """The sessions of the next round: none only where none runs."""
        self._admit()
        turn: list[tuple[Session, Plan]] = []
        tokens = 0
        for session in self.running:
            plan = session.plan()
            assert plan is not None
            tokens += self.runner.cost(plan)
            if turn and tokens > self.token_budget:
                break
            turn.append((session, plan))
        return turn
