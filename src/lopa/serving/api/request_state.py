"""One job as the API sees it: what has come of it so far, across restarts of the engine.

Decoding is deterministic, so a job that is submitted again goes through the same rounds. Its
events up to the round that was reached before are kept from the reader; when that round is reached
again the text must be the same, or a stream, which cannot take back what it sent, ends in an error.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from lopa.serving.api.errors import of_failure
from lopa.serving.jobs import Accepted, Advance, Event, Failed, Finished, Job, Token

Sink = Callable[[int, Event], None]  # (index of the flow in its request, event)
# Name → value, None where it is not known; or values by replica.
Gauges = Mapping[str, float | Mapping[str, float] | None]


class Observer(Protocol):
    """Who counts what happens; see `metrics`."""

    def advanced(self, flow: Flow, event: Advance) -> None: ...
    def ended(self, flow: Flow, event: Finished | Failed) -> None: ...


class Unobserved:
    def advanced(self, flow: Flow, event: Advance) -> None: ...
    def ended(self, flow: Flow, event: Finished | Failed) -> None: ...


class Flow:
    """Made by a backend, which feeds it with `take`; read by a route through its sink."""

    def __init__(self, job: Job, index: int, sink: Sink, observer: Observer) -> None:
        self.job = job
        self.index = index
        self.began = time.monotonic()
        self.first_text: float | None = None  # seconds until there was any
        self.accepted: asyncio.Future[Accepted] = asyncio.get_running_loop().create_future()
        # A route that has already given up never looks at it.
        self.accepted.add_done_callback(lambda future: future.cancelled() or future.exception())
        self.end: Finished | Failed | None = None
        self.text = ""
        self.tokens: list[Token] = []
        self.rounds = 0
        self.filled = 0
        self.attempts = 0  # engines lost in a row while it ran, without any progress
        self.submitted = False  # an engine has it now
        self.handed: float | None = None  # seconds until one had it for the first time
        self.running = False  # and has run a round of it
        self.dropped = False  # nobody waits for it any more
        self._restarted = False
        self._sink = sink
        self._observer = observer
        self._replayed: tuple[int, str, list[Token]] | None = None  # progress of a later attempt

    def give(self) -> None:
        """An engine has it now."""
        self.submitted = True
        if self.handed is None:
            self.handed = self.seconds

    def again(self) -> None:
        """The engine is gone; from here on events are those of another attempt."""
        self.submitted = self.running = False
        self._restarted = True
        self._replayed = (0, "", []) if self.rounds else None

    def take(self, event: Event) -> None:
        if self.end is not None:
            return
        if isinstance(event, Accepted):
            if not self.accepted.done():
                self.accepted.set_result(event)
                self._sink(self.index, event)
        elif isinstance(event, Advance):
            self._advance(event)
        else:
            self._close(event)

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
                return  # where it was before
            if self.job.stream:
                self._close(
                    Failed(
                        kind="lost",
                        message="the engine was started again and the answer took another "
                        "course: ask again",
                    )
                )
                return
            self.rounds, self.text, self.tokens = rounds, text, tokens
            return
        self.attempts = 0
        self.rounds = event.round
        self.filled = event.filled
        self.text += event.text
        self.tokens += event.tokens
        if event.text and self.first_text is None:
            self.first_text = time.monotonic() - self.began
        self._observer.advanced(self, event)
        self._sink(self.index, event)

    def _close(self, event: Finished | Failed) -> None:
        self.end = event
        if not self.accepted.done():
            assert isinstance(event, Failed)
            self.accepted.set_exception(of_failure(event))
        self._observer.ended(self, event)
        self._sink(self.index, event)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    @property
    def elsewhere(self) -> float | None:
        """Seconds of its time that were not the API's: until an engine had it, and in there.

        None where they are not known: it failed, or an engine was lost on the way.
        """
        if self._restarted or self.handed is None or not isinstance(self.end, Finished):
            return None
        return self.handed + self.end.engine_seconds

    def describe(self) -> dict[str, Any]:
        """A line of `/slots`."""
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
    """Where jobs are run: an engine process here, or replicas over a cluster."""

    @property
    def ready(self) -> bool: ...
    @property
    def state(self) -> str: ...
    def submit(self, jobs: list[Job], sink: Sink) -> list[Flow]:
        """Take all of them, or raise ApiError: overloaded, not ready."""

    def drop(self, flow: Flow) -> None:
        """Nobody waits for it any more; its slot is free within a round."""

    def flows(self) -> list[Flow]: ...
    async def refresh(self) -> None:
        """Bring `ready`, `state` and `gauges` up to date, where that takes a question."""

    def gauges(self) -> Gauges: ...
    async def start(self) -> None: ...
    async def stop(self) -> None: ...
    def drain(self) -> None:
        """Take no more, and finish what there is."""
