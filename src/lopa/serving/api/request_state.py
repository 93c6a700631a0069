"""The state of one job in the API: its events so far, across restarts of the engine.

An HTTP request has one job per choice. Decoding is deterministic but for the branches that `auto`
gives a round, so a job that is submitted again with those it had runs the same rounds. Events up to
the last round that was reported are not reported again. When that round is reached the text must be
the same; if it is not, a stream ends in an error, because what was sent cannot be taken back.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from lopa.serving.api.errors import error_for
from lopa.serving.jobs import Accepted, Advance, Event, Failed, Finished, Job, Token

Sink = Callable[[int, Event], None]  # (index of the job in its HTTP request, event)
# Name → value, None where it is not known; or values by replica.
Gauges = Mapping[str, float | Mapping[str, float] | None]


class Observer(Protocol):
    """Counts events; see `metrics`."""

    def advanced(self, request: RequestState, event: Advance) -> None: ...
    def ended(self, request: RequestState, event: Finished | Failed) -> None: ...


class NullObserver:
    def advanced(self, request: RequestState, event: Advance) -> None: ...
    def ended(self, request: RequestState, event: Finished | Failed) -> None: ...


class RequestState:
    """Made by a backend, which passes events to `handle`; a route reads them through the sink."""

    def __init__(self, job: Job, index: int, sink: Sink, observer: Observer) -> None:
        self.job = job
        self.index = index
        self.arrived = time.monotonic()
        self.first_text_seconds: float | None = None
        self.accepted: asyncio.Future[Accepted] = asyncio.get_running_loop().create_future()
        # Retrieves the exception: a route that has returned never looks at it.
        self.accepted.add_done_callback(lambda future: future.cancelled() or future.exception())
        self.end: Finished | Failed | None = None
        self.text = ""
        self.tokens: list[Token] = []
        self.rounds = 0
        self.branches: list[int] = []  # of those rounds
        self.filled = 0
        self.attempts = 0  # engines lost in a row while it ran, without progress in between
        self.submitted = False  # an engine has it
        self.submitted_after: float | None = None  # seconds until it was first submitted
        self.running = False  # the engine has run a round of it
        self.aborted = False  # the client has disconnected
        self._restarted = False
        self._sink = sink
        self._observer = observer
        # After a restart: (round, text, tokens) of this attempt, until it is where it was.
        self._replayed: tuple[int, str, list[Token]] | None = None

    def mark_submitted(self) -> None:
        self.submitted = True
        if self.submitted_after is None:
            self.submitted_after = self.seconds

    def restart(self) -> None:
        """The engine is lost: the next events are those of another attempt."""
        self.submitted = self.running = False
        self._restarted = True
        if len(self.branches) > len(self.job.known_branches):
            self.job.known_branches = self.branches.copy()
        self._replayed = (0, "", []) if self.rounds else None

    def handle(self, event: Event) -> None:
        if self.end is not None:
            return
        if isinstance(event, Accepted):
            if not self.accepted.done():
                self.accepted.set_result(event)
                self._sink(self.index, event)
        elif isinstance(event, Advance):
            self._advance(event)
        else:
            self._finish(event)

    def _advance(self, event: Advance) -> None:
        self.running = True
        if self._replayed is not None:
            _, text, tokens = self._replayed
            self._replayed = (event.round, text + event.text, tokens + event.tokens)
            if event.round < self.rounds:
                return
            rounds, text, tokens = self._replayed
            self._replayed = None
            if event.round == self.rounds and text == self.text:
                return  # it is where it was
            if self.job.stream:
                message = "the engine was restarted and its output changed: try again"
                self._finish(Failed(kind="lost", message=message))
                return
            self.rounds, self.text, self.tokens = rounds, text, tokens
            return
        self.attempts = 0
        self.rounds = event.round
        self.branches.append(event.branches - 1)
        self.filled = event.filled
        self.text += event.text
        self.tokens += event.tokens
        if event.text and self.first_text_seconds is None:
            self.first_text_seconds = self.seconds
        self._observer.advanced(self, event)
        self._sink(self.index, event)

    def _finish(self, event: Finished | Failed) -> None:
        self.end = event
        if not self.accepted.done():
            assert isinstance(event, Failed)
            self.accepted.set_exception(error_for(event))
        self._observer.ended(self, event)
        self._sink(self.index, event)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.arrived

    @property
    def seconds_outside_api(self) -> float | None:
        """Seconds until it was submitted, and then in the engine.

        None where they are not known: it failed, or an engine was lost.
        """
        if self._restarted or self.submitted_after is None or not isinstance(self.end, Finished):
            return None
        return self.submitted_after + self.end.engine_seconds

    def describe(self) -> dict[str, Any]:
        """An entry of `/slots`."""
        known = self.accepted.done() and not self.accepted.exception()
        accepted = self.accepted.result() if known else None
        return {
            "id": self.job.id,
            "state": "running" if self.running else "waiting",
            "prompt_tokens": accepted.prompt_tokens if accepted else None,
            "rounds": self.rounds,
            "filled_tokens": self.filled,
            "total_tokens": accepted.max_tokens if accepted else None,
            "tpf": self.filled / self.rounds if self.rounds else None,
            "seconds": self.seconds,
        }


class Backend(Protocol):
    """Where jobs run: `EngineClient` (one engine process) or `ReplicaPool` (a Ray cluster)."""

    @property
    def ready(self) -> bool: ...
    @property
    def state(self) -> str: ...
    def submit(self, jobs: list[Job], sink: Sink) -> list[RequestState]:
        """Accept all of them, or raise ApiError: at capacity (429), not ready (503)."""

    def abort(self, request: RequestState) -> None:
        """The client has disconnected: free its slot within a round."""

    def requests(self) -> list[RequestState]: ...
    async def refresh(self) -> None:
        """Update `ready`, `state` and `gauges` where that takes a message."""

    async def check_round(self) -> str:
        """Ask for a round; returns what is wrong, or an empty text."""

    def gauges(self) -> Gauges: ...
    async def start(self) -> None: ...
    async def stop(self) -> None: ...
    def drain(self, seconds: float) -> None:
        """Accept no more requests; those that run may finish for so long."""
