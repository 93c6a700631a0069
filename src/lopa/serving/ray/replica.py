"""A replica: an engine process with its client, as an actor of a Ray cluster."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from typing import Any

from lopa.errors import LopaError
from lopa.serving import logs
from lopa.serving.api.engine_client import EngineClient
from lopa.serving.api.request_state import NullObserver
from lopa.serving.config import EngineConfig
from lopa.serving.jobs import Event, Job, pack
from lopa.thread_waits import wait_briefly

REPLICA_QUEUE = 8  # jobs that wait in a replica, so that a free slot need not wait for one


class Replica:
    """It is up when its model is loaded. All of its ranks are on its node."""

    async def __init__(  # type: ignore[misc] # Ray Serve awaits it
        self, engine: dict[str, Any], stall_seconds: float, health_seconds: float
    ) -> None:
        logs.set_up("json")
        self.name = f"{socket.gethostname()}:{os.getpid()}"
        config = EngineConfig(**engine)
        wait_briefly()
        if config.ranks > 1:
            os.environ["OMP_NUM_THREADS"] = "1"  # a rank has one core
        self._client = EngineClient(
            config,
            NullObserver(),
            max_queue=REPLICA_QUEUE,
            stall_seconds=stall_seconds,
            health_seconds=health_seconds,
        )
        await self._client.start()
        while not self._client.ready:
            if self._client.start_error is not None:
                raise LopaError(self._client.start_error[0])
            await asyncio.sleep(0.05)

    async def check_health(self) -> None:
        if self._client.state == "failed":
            raise RuntimeError("the engine does not start")

    async def check_round(self) -> str:
        return await self._client.check_round()

    async def record_routing_stats(self) -> dict[str, Any]:
        """For `replica_router`; Ray Serve asks for it."""
        return {"round_cost": self._client.engine.get("round_cost")}

    async def gauges(self) -> tuple[str, dict[str, float | None]]:
        """Its name and its gauges."""
        return self.name, self._client.gauges()

    async def run(self, job: dict[str, Any]) -> AsyncIterator[Any]:
        """The replica's name, then the job's events."""
        yield self.name
        queue: asyncio.Queue[Event] = asyncio.Queue()
        (request,) = self._client.submit([Job(**job)], lambda i, event: queue.put_nowait(event))
        try:
            while request.end is None or not queue.empty():
                yield pack(await queue.get())
        finally:
            if request.end is None:
                self._client.abort(request)

    async def __del__(self) -> None:
        if hasattr(self, "_client"):
            await self._client.stop()
