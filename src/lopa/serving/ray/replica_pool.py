"""A backend of replicas, in the gateway.

A job is submitted to a replica, and when that is lost, to another; a stream goes on after what it
has sent.
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
from lopa.serving.api.errors import check_capacity, loading, shutting_down
from lopa.serving.api.metrics import Metrics
from lopa.serving.api.request_state import Gauges, RequestState, Sink
from lopa.serving.api.retry_after import RetryAfter
from lopa.serving.jobs import Failed, Finished, Job, unpack

log = logging.getLogger("lopa.serving")

_GAUGES_MAX_AGE_SECONDS = 1.0
_GAUGES_TIMEOUT_SECONDS = 2.0
_ROUND_TIMEOUT_SECONDS = 10.0
# Shown by replica; the other gauges are counted here, over all requests.
_BY_REPLICA = (
    "ranks_alive",
    "engine_restarts",
    "cache_tokens",
    "cache_pages_used",
    "cache_pages",
)


class ReplicaPool:
    """Use it on one event loop only."""

    def __init__(self, replicas: DeploymentHandle[Any], metrics: Metrics, capacity: int) -> None:
        self.capacity = capacity
        self.state = "loading"  # then ready, restarting (no replica is up), draining
        self._replicas = replicas
        self._metrics = metrics
        self._requests: dict[str, RequestState] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by job: what submits it
        self._startup: asyncio.Task[None] | None = None
        self._gauges: dict[str, dict[str, float | None]] = {}  # by replica
        self._asked_at = -_GAUGES_MAX_AGE_SECONDS
        self._asking = asyncio.Lock()
        self._retry_after = RetryAfter()

    @property
    def ready(self) -> bool:
        return self.state == "ready"

    def requests(self) -> list[RequestState]:
        return list(self._requests.values())

    def gauges(self) -> Gauges:
        running = sum(request.running for request in self._requests.values())
        found: dict[str, Any] = {
            "ready": self.ready,
            "requests_running": running,
            "requests_waiting": len(self._requests) - running,
            "replicas": sum(bool(gauges["ready"]) for gauges in self._gauges.values()),
        }
        for name in _BY_REPLICA:
            values = {replica: gauges[name] for replica, gauges in self._gauges.items()}
            found[name] = {replica: value for replica, value in values.items() if value is not None}
        return found

    async def refresh(self) -> None:
        """Ask the replicas for their gauges, unless those at hand are new enough."""
        async with self._asking:
            age = time.monotonic() - self._asked_at
            if self.state in ("loading", "draining") or age < _GAUGES_MAX_AGE_SECONDS:
                return
            self._gauges = await self._ask()
            self._asked_at = time.monotonic()
            if self.state != "draining":
                up = any(gauges["ready"] for gauges in self._gauges.values())
                self.state = "ready" if up else "restarting"

    async def check_round(self) -> str:
        """Ask every replica for a round; one that answers is enough."""
        try:
            errors = await self._replicas.broadcast("check_round").results_async(
                timeout_s=_ROUND_TIMEOUT_SECONDS, return_exceptions=True
            )
        except (TimeoutError, RayError, RayServeException) as error:
            return f"no replica ran a round ({type(error).__name__})"
        return "" if "" in errors else f"no replica ran a round ({errors[0] if errors else ''})"

    async def _ask(self) -> dict[str, dict[str, float | None]]:
        try:
            replies = await self._replicas.broadcast("gauges").results_async(
                timeout_s=_GAUGES_TIMEOUT_SECONDS, return_exceptions=True
            )
        except TimeoutError:  # a replica hangs; Serve's health check finds it
            log.warning("a replica does not answer")
            return self._gauges
        except (RayError, RayServeException) as error:
            log.warning("there is no replica", extra={"reason": type(error).__name__})
            return {}
        return dict(reply for reply in replies if not isinstance(reply, BaseException))

    def submit(self, jobs: list[Job], sink: Sink) -> list[RequestState]:
        if self.state == "draining":
            raise shutting_down(self._retry_after.for_shutdown())
        if self.state == "loading":
            raise loading(self._retry_after.for_start())
        check_capacity(len(jobs), len(self._requests), self.capacity, self._seconds_until_ended)
        requests = [RequestState(job, i, sink, self._metrics) for i, job in enumerate(jobs)]
        for request in requests:
            self._requests[request.job.id] = request
            self._tasks[request.job.id] = asyncio.create_task(self._run(request))
        return requests

    def _seconds_until_ended(self, count: int) -> int:
        running = sum(request.running for request in self._requests.values())
        return self._retry_after.for_capacity(count, max(1, running), self.ready)

    def abort(self, request: RequestState) -> None:
        self._requests.pop(request.job.id, None)
        task = self._tasks.pop(request.job.id, None)
        if task is not None:
            task.cancel()

    async def start(self) -> None:
        self._startup = asyncio.create_task(self._wait_for_replica())

    async def _wait_for_replica(self) -> None:
        """Until a replica is up: Serve delays the call until then."""
        while self.state == "loading":
            try:
                name, gauges = await self._replicas.gauges.remote()
            except (RayError, RayServeException) as error:
                log.warning("no replica yet", extra={"reason": type(error).__name__})
                await asyncio.sleep(1.0)
                continue
            if self.state == "loading":
                self._gauges, self.state = {name: gauges}, "ready"
                self._retry_after.started()

    async def stop(self) -> None:
        self.drain(0.0)
        if self._startup is not None:
            self._startup.cancel()
        for request in self.requests():
            request.handle(
                Failed(kind="shutdown", message="the server is shutting down: try again")
            )
            self.abort(request)

    def drain(self, seconds: float) -> None:
        self.state = "draining"
        self._retry_after.draining(seconds)

    async def _run(self, request: RequestState) -> None:
        """Submit a job to replicas until one has finished it."""
        try:
            while not _has_ended(request):
                try:
                    reason = await self._run_on_replica(request)
                except (RayError, RayServeException) as error:
                    reason = type(error).__name__
                if _has_ended(request):
                    break
                self._metrics.retried.inc()
                request.attempts += 1
                request.restart()
                log.error("replica lost", extra={"id": request.job.id, "reason": reason})
                if request.attempts >= MAX_ATTEMPTS:
                    message = f"{request.attempts} replicas died while they ran this request"
                    request.handle(Failed(kind="engine", message=message))
                else:  # Serve may choose the lost replica again until it has noticed
                    await asyncio.sleep(0.25 * 2**request.attempts)
        except Exception as error:
            log.exception("failed", extra={"id": request.job.id})
            message = f"the replica failed ({type(error).__name__})"
            request.handle(Failed(kind="engine", message=message))
        finally:
            self._requests.pop(request.job.id, None)
            self._tasks.pop(request.job.id, None)

    async def _run_on_replica(self, request: RequestState) -> str:
        """Handle a replica's events until they end; returns why they ended."""
        events: Any = self._replicas.options(stream=True).run.remote(asdict(request.job))
        try:
            async for item in events:
                if isinstance(item, str):
                    request.mark_submitted()
                    self._metrics.replica_jobs.labels(item).inc()
                    continue
                event = unpack(item)
                if isinstance(event, Failed) and event.kind == "shutdown":
                    return "it is shutting down"
                request.handle(event)
                if isinstance(event, Finished):
                    self._retry_after.record(event)
        finally:
            if not isinstance(request.end, Finished):
                events.cancel()
        return "it ended too early"


def _has_ended(request: RequestState) -> bool:
    return request.end is not None
