"""One HTTP request and its flows: their events in one line, and what happens when nobody waits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any

from starlette.types import Receive

from lopa.serving.api.errors import of_failure
from lopa.serving.api.metrics import Metrics
from lopa.serving.api.request_state import Backend, Flow
from lopa.serving.jobs import Accepted, Advance, Event, Failed, Finished, Job

KEEP_ALIVE = 15.0  # seconds without a word, after which proxies lose their patience


class Gone(Exception):  # noqa: N818 (it is no error of anybody's)
    """The client has left."""


class Exchange:
    """A context: on the way out, whatever has not ended is dropped."""

    def __init__(
        self, backend: Backend, metrics: Metrics, jobs: list[Job], receive: Receive
    ) -> None:
        self._backend = backend
        self._metrics = metrics
        self._queue: asyncio.Queue[tuple[int, Event] | None] = asyncio.Queue()
        self._streams = any(job.stream for job in jobs)
        self.flows: list[Flow] = backend.submit(jobs, self._put)
        self._watch = asyncio.create_task(self._until_gone(receive))

    def _put(self, index: int, event: Event) -> None:
        if self._streams or not isinstance(event, Advance):  # nobody reads half an answer
            self._queue.put_nowait((index, event))

    def __enter__(self) -> Exchange:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self._watch.cancel()
        self._drop()

    async def accepted(self) -> list[Accepted]:
        """When all of them are; ApiError when one is not."""
        found = []
        for flow in self.flows:
            either: set[asyncio.Future[Any]] = {flow.accepted, self._watch}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not flow.accepted.done():
                raise Gone
            found.append(flow.accepted.result())
        return found

    async def events(self) -> AsyncIterator[tuple[int, Event] | None]:
        """Events as they come, until every flow has ended; None when there was none for long."""
        left = len(self.flows)
        while left:
            try:
                async with asyncio.timeout(KEEP_ALIVE):
                    found = await self._queue.get()
            except TimeoutError:
                yield None
                continue
            if found is None:
                raise Gone
            left -= isinstance(found[1], Finished | Failed)
            yield found

    async def results(self) -> list[Flow]:
        """The flows when all have ended; ApiError when one failed."""
        async for found in self.events():
            if found is not None and isinstance(found[1], Failed):
                raise of_failure(found[1])
        return self.flows

    async def _until_gone(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._drop()
        self._queue.put_nowait(None)

    def _drop(self) -> None:
        for flow in self.flows:
            if flow.end is None and not flow.dropped:
                flow.dropped = True
                self._backend.drop(flow)
                self._metrics.dropped.inc()
