"""A backend of replicas, as the gateway sees them.

A job is given to a replica, and when that is lost, to another; the reader of a stream notices
nothing but the wait.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import asdict
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from lopa.serving.api.engine_client import MAX_ATTEMPTS
from lopa.serving.api.errors import check_room, loading, shutting_down
from lopa.serving.api.metrics import Metrics
from lopa.serving.api.request_state import Flow, Gauges, Sink
from lopa.serving.jobs import Failed, Finished, Job, unpack

log = logging.getLogger("lopa.serving")

_FRESH = 1.0  # seconds for which what replicas said is good
_PATIENCE = 2.0  # seconds in which they are to say it
# By replica; what the others come to is known here, from all the jobs.
_BY_REPLICA = (
    "ranks_alive",
    "engine_restarts",
    "cache_tokens",
    "cache_pages_used",
    "cache_pages",
)


class Cluster:
    """Use on one event loop only."""

    def __init__(self, replicas: DeploymentHandle[Any], metrics: Metrics, capacity: int) -> None:
        self.capacity = capacity
        self.state = "loading"  # then ready, restarting (no replica answers), draining
        self._replicas = replicas
        self._metrics = metrics
        self._flows: dict[str, Flow] = {}
        self._carriers: dict[str, asyncio.Task[None]] = {}
        self._first: asyncio.Task[None] | None = None
        self._said: dict[str, dict[str, float | None]] = {}  # replica → gauges
        self._asked = -_FRESH
        self._asking = asyncio.Lock()

    @property
    def ready(self) -> bool:
        return self.state == "ready"

    def flows(self) -> list[Flow]:
        return list(self._flows.values())

    def gauges(self) -> Gauges:
        running = sum(flow.running for flow in self._flows.values())
        own: dict[str, Any] = {
            "ready": self.ready,
            "requests_running": running,
            "requests_waiting": len(self._flows) - running,
            "replicas": sum(bool(said["ready"]) for said in self._said.values()),
        }
        for name in _BY_REPLICA:
            found = {replica: said[name] for replica, said in self._said.items()}
            own[name] = {replica: value for replica, value in found.items() if value is not None}
        return own

    async def refresh(self) -> None:
        """Ask the replicas how they are, if that was long ago."""
        async with self._asking:
            if self.state in ("loading", "draining") or time.monotonic() < self._asked + _FRESH:
                return
            self._said = await self._ask()
            self._asked = time.monotonic()
            if self.state != "draining":
                up = any(said["ready"] for said in self._said.values())
                self.state = "ready" if up else "restarting"

    async def _ask(self) -> dict[str, dict[str, float | None]]:
        try:
            answers = await self._replicas.broadcast("gauges").results_async(
                timeout_s=_PATIENCE, return_exceptions=True
            )
        except TimeoutError:  # one of them hangs, which Serve finds out: what was said last stays
            log.warning("a replica does not answer")
            return self._said
        except (RayError, RayServeException) as error:
            log.warning("there is no replica", extra={"reason": type(error).__name__})
            return {}
        return dict(answer for answer in answers if not isinstance(answer, BaseException))

    def submit(self, jobs: list[Job], sink: Sink) -> list[Flow]:
        if self.state == "draining":
            raise shutting_down()
        if self.state == "loading":
            raise loading()
        check_room(len(jobs), len(self._flows), self.capacity, retry_after=1)
        flows = [Flow(job, i, sink, self._metrics) for i, job in enumerate(jobs)]
        for flow in flows:
            self._flows[flow.job.id] = flow
            self._carriers[flow.job.id] = asyncio.create_task(self._carry(flow))
        return flows

    def drop(self, flow: Flow) -> None:
        self._flows.pop(flow.job.id, None)
        carrier = self._carriers.pop(flow.job.id, None)
        if carrier is not None:
            carrier.cancel()

    async def start(self) -> None:
        self._first = asyncio.create_task(self._wait_for_one())

    async def _wait_for_one(self) -> None:
        """Until a replica is up: Serve holds the call back until then."""
        while self.state == "loading":
            try:
                name, said = await self._replicas.gauges.remote()
            except (RayError, RayServeException) as error:
                log.warning("no replica yet", extra={"reason": type(error).__name__})
                await asyncio.sleep(1.0)
                continue
            if self.state == "loading":
                self._said, self.state = {name: said}, "ready"

    async def stop(self) -> None:
        self.drain()
        if self._first is not None:
            self._first.cancel()
        for flow in self.flows():
            flow.take(Failed(kind="shutdown", message="the server is shutting down: ask again"))
            self.drop(flow)

    def drain(self) -> None:
        self.state = "draining"

    async def _carry(self, flow: Flow) -> None:
        """Give a job to replicas until one has answered it."""
        try:
            while flow.end is None:
                try:
                    reason = await self._run(flow)
                except (RayError, RayServeException) as error:
                    reason = type(error).__name__
                if self._is_over(flow):
                    break
                self._metrics.retried.inc()
                flow.attempts += 1
                flow.again()
                log.error("replica lost", extra={"id": flow.job.id, "reason": reason})
                if flow.attempts >= MAX_ATTEMPTS:
                    message = f"{flow.attempts} replicas were lost while they worked on this"
                    flow.take(Failed(kind="engine", message=message))
                else:  # until the cluster knows that it is lost, it may send us there again
                    await asyncio.sleep(0.25 * 2**flow.attempts)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            log.exception("failed", extra={"id": flow.job.id})
            flow.take(Failed(kind="engine", message=f"the replica failed ({type(error).__name__})"))
        finally:
            self._flows.pop(flow.job.id, None)
            self._carriers.pop(flow.job.id, None)

    def _is_over(self, flow: Flow) -> bool:
        return flow.end is not None

    async def _run(self, flow: Flow) -> str:
        """Until the replica has no more to say of a job; why, where that was too early."""
        events: Any = self._replicas.options(stream=True).run.remote(asdict(flow.job))
        try:
            async for item in events:
                if isinstance(item, str):
                    flow.give()
                    self._metrics.replica_jobs.labels(item).inc()
                    continue
                event = unpack(item)
                if isinstance(event, Failed) and event.kind == "shutdown":
                    return "it is shutting down"
                flow.take(event)
        finally:
            if not isinstance(flow.end, Finished):
                events.cancel()
        return "it ended too early"
