"""One HTTP request: its jobs' events in one queue, and the watch for a client that disconnects.

Constructing a `RequestContext` submits the jobs. That is where a request is refused with 429:
`Backend.submit` calls `errors.check_capacity`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from starlette.types import Receive

from lopa.serving.api.errors import error_for
from lopa.serving.api.metrics import Metrics
from lopa.serving.api.request_state import Backend, RequestState
from lopa.serving.jobs import Accepted, Advance, Event, Failed, Finished, Job

KEEP_ALIVE_SECONDS = 15.0  # of silence; proxies close a connection that is silent for longer


class ClientDisconnected(Exception):  # noqa: N818 (not an error)
    pass


class RequestContext:
    """Closing it aborts the jobs that have not ended."""

    def __init__(
        self, backend: Backend, metrics: Metrics, jobs: list[Job], receive: Receive
    ) -> None:
        self._backend = backend
        self._metrics = metrics
        self._queue: asyncio.Queue[tuple[int, Event] | None] = asyncio.Queue()
        self._streams = any(job.stream for job in jobs)
        self.requests: list[RequestState] = backend.submit(jobs, self._enqueue)
        self._disconnect = asyncio.create_task(self._watch_disconnect(receive))

    def _enqueue(self, index: int, event: Event) -> None:
        if self._streams or not isinstance(event, Advance):
            self._queue.put_nowait((index, event))

    def close(self) -> None:
        self._disconnect.cancel()
        self._abort()

    async def accepted(self) -> list[Accepted]:
        """Wait until all jobs are accepted; ApiError when one is not."""
        found = []
        for request in self.requests:
            either: set[asyncio.Future[Any]] = {request.accepted, self._disconnect}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not request.accepted.done():
                raise ClientDisconnected
            found.append(request.accepted.result())
        return found

    async def events(self) -> AsyncIterator[tuple[int, Event] | None]:
        """(index, event) until every job has ended; None after `KEEP_ALIVE_SECONDS` of silence."""
        left = len(self.requests)
        while left:
            try:
                async with asyncio.timeout(KEEP_ALIVE_SECONDS):
                    found = await self._queue.get()
            except TimeoutError:
                yield None
                continue
            if found is None:
                raise ClientDisconnected
            left -= isinstance(found[1], Finished | Failed)
            yield found

    async def results(self) -> list[RequestState]:
        """Wait until all jobs have ended; ApiError when one failed."""
        async for found in self.events():
            if found is not None and isinstance(found[1], Failed):
                raise error_for(found[1])
        return self.requests

    async def _watch_disconnect(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._abort()
        self._queue.put_nowait(None)

    def _abort(self) -> None:
        for request in self.requests:
            if request.end is None and not request.aborted:
                request.aborted = True
                self._backend.abort(request)
                if not request.job.tokenize:  # which has no end of its own
                    self._metrics.aborted.inc()
