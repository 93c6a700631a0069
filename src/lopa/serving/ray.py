"""Replicas over a Ray cluster, behind one gateway.

    serve run lopa.serving.ray:app model=tiny replicas=2

The gateway is the same application with another backend: it gives each job to a replica, and when
the replica is lost, to another; the reader of a stream notices nothing but the wait. A replica is
an engine process with its client. Its resources are one placement group, so that the processes of
a replica, which talk all the time, are never spread over nodes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any

import ray
from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict
from ray import serve
from ray.exceptions import RayError
from ray.serve.handle import DeploymentHandle

from lopa.config import DecodeConfig
from lopa.errors import ConfigError, LopaError
from lopa.serving import logs
from lopa.serving.app import create_app
from lopa.serving.client import MAX_ATTEMPTS, Client
from lopa.serving.flow import Flow, Sink, Unobserved
from lopa.serving.jobs import Event, Failed, Finished, Job, pack, unpack
from lopa.serving.metrics import Metrics
from lopa.serving.problems import ApiError
from lopa.serving.server import listen
from lopa.serving.settings import EngineConfig, ServeConfig, name_of

log = logging.getLogger("lopa.serving")

_SLACK = 8  # jobs that a replica holds beside those it runs, so that none waits for the network
_MANY = 100_000  # the gateway has limits of its own


class Replica:
    """One engine. It is up when its model is loaded."""

    async def __init__(  # type: ignore[misc] # Serve awaits it
        self, engine: dict[str, Any], stall_seconds: float
    ) -> None:
        logs.set_up("json")
        self.name = f"{socket.gethostname()}:{os.getpid()}"
        self._client = Client(
            EngineConfig(**engine), Unobserved(), max_queue=_SLACK, stall_seconds=stall_seconds
        )
        await self._client.start()
        while not self._client.ready:
            if self._client.failure is not None:
                raise LopaError(self._client.failure[0])
            await asyncio.sleep(0.05)

    async def check_health(self) -> None:
        if self._client.state == "failed":
            raise RuntimeError("the engine does not start")

    async def run(self, job: dict[str, Any]) -> AsyncIterator[Any]:
        """The replica's name, then the job's events."""
        yield self.name
        queue: asyncio.Queue[Event] = asyncio.Queue()
        (flow,) = self._client.submit([Job(**job)], lambda i, event: queue.put_nowait(event))
        try:
            while flow.end is None or not queue.empty():
                yield pack(await queue.get())
        finally:
            if flow.end is None:
                self._client.drop(flow)

    async def __del__(self) -> None:
        if hasattr(self, "_client"):
            await self._client.stop()


class Cluster:
    """A backend of replicas, as the gateway sees them."""

    def __init__(self, replicas: DeploymentHandle[Any], metrics: Metrics, capacity: int) -> None:
        self.capacity = capacity
        self.state = "ready"
        self._replicas = replicas.options(stream=True)
        self._metrics = metrics
        self._flows: dict[str, Flow] = {}
        self._carriers: dict[str, asyncio.Task[None]] = {}
        self._lost = 0

    @property
    def ready(self) -> bool:
        return self.state == "ready"

    def flows(self) -> list[Flow]:
        return list(self._flows.values())

    def gauges(self) -> dict[str, float | None]:
        running = sum(flow.running for flow in self._flows.values())
        return {
            "ready": self.ready,
            "requests_running": running,
            "requests_waiting": len(self._flows) - running,
            "engine_restarts": self._lost,
        }

    def submit(self, jobs: list[Job], sink: Sink) -> list[Flow]:
        if not self.ready:
            raise ApiError(503, "the server is shutting down", code="shutting_down", retry_after=1)
        if len(self._flows) + len(jobs) > self.capacity:
            raise ApiError(
                429,
                f"{len(self._flows)} requests are in line already: try again later",
                code="queue_full",
                retry_after=1,
            )
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

    async def start(self) -> None: ...

    async def stop(self) -> None:
        self.drain()
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
                    await self._run(flow)
                    reason = "it ended too early"
                except RayError as error:
                    reason = type(error).__name__
                if self._is_over(flow):
                    break
                self._lost += 1
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

    async def _run(self, flow: Flow) -> None:
        flow.submitted = True
        events: Any = self._replicas.run.remote(asdict(flow.job))
        try:
            async for item in events:
                if isinstance(item, str):
                    self._metrics.replica_jobs.labels(item).inc()
                else:
                    flow.take(unpack(item))
        finally:
            if not isinstance(flow.end, Finished):
                events.cancel()


class Gateway:
    """The application on a cluster."""

    def __init__(
        self, config: dict[str, Any], model: str, capacity: int, replicas: DeploymentHandle[Any]
    ) -> None:
        logs.set_up("json")
        metrics = Metrics()
        cluster = Cluster(replicas, metrics, capacity)
        self._app = create_app(cluster, metrics, ServeConfig(**config), model)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._app


class Arguments(BaseModel):
    """What `serve run lopa.serving.ray:app` takes, as name=value; more go to decoding."""

    model_config = ConfigDict(extra="allow")

    model: str = "tiny"
    adapter: str | None = None
    device: str | None = None
    dtype: str | None = None
    quantize: str | None = None
    cache_tokens: int | None = None
    preset: str | None = None
    replicas: int = 1
    max_replicas: int | None = None
    gpus: int = 0
    max_running: int | None = None
    max_queue: int = ServeConfig().max_queue
    served_name: str | None = None


def app(arguments: Arguments) -> serve.Application:
    """For `serve run`: options by name, those of `DecodeConfig` included."""
    extra = arguments.model_extra or {}
    unknown = sorted(set(extra) - set(DecodeConfig.__dataclass_fields__))
    if unknown:
        raise ConfigError(f"unknown option {unknown[0]}: see lopa serve --help")
    numbers = {name: _number(value) for name, value in extra.items()}
    names = ("adapter", "device", "dtype", "quantize", "cache_tokens")
    of_llm = {name: getattr(arguments, name) for name in names}
    engine = EngineConfig(
        model=arguments.model,
        llm={name: value for name, value in of_llm.items() if value is not None},
        preset=arguments.preset,
        decoding=numbers,
        max_running=arguments.max_running,
    )
    config = ServeConfig(max_queue=arguments.max_queue, served_name=arguments.served_name)
    return build(
        config,
        engine,
        replicas=arguments.replicas,
        max_replicas=arguments.max_replicas,
        gpus=arguments.gpus,
    )


def _number(text: Any) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(str(text).lower(), text)


def build(
    config: ServeConfig,
    engine: EngineConfig,
    *,
    replicas: int,
    max_replicas: int | None = None,
    gpus: int = 0,
) -> serve.Application:
    """The gateway and its replicas; more of them, up to `max_replicas`, as requests wait.

    A replica has `gpus` devices, or a core where there are none.
    """
    from lopa.engine.engine import MAX_RUNNING

    if replicas < 1 or (max_replicas is not None and max_replicas < replicas):
        raise ConfigError("replicas must be at least 1, and max_replicas no fewer than that")
    at_once = engine.max_running or MAX_RUNNING
    most = max_replicas or replicas
    scaling: dict[str, Any] = {"num_replicas": replicas}
    if max_replicas is not None:
        limits = {"min_replicas": replicas, "max_replicas": max_replicas}
        scaling = {"autoscaling_config": {**limits, "target_ongoing_requests": at_once}}
    bundle = {"CPU": 1.0, "GPU": 1.0} if gpus else {"CPU": 1.0}
    replica: Any = serve.deployment(
        Replica,
        name="replica",
        **scaling,
        max_ongoing_requests=at_once + _SLACK,
        ray_actor_options={"num_cpus": 1, "num_gpus": 1 if gpus else 0},
        placement_group_bundles=[bundle] * max(1, gpus),
        placement_group_strategy="STRICT_PACK",
        health_check_period_s=2,
        health_check_timeout_s=10,
        graceful_shutdown_timeout_s=config.drain_seconds,
    )
    gateway: Any = serve.deployment(
        serve.ingress()(Gateway),
        name="gateway",
        max_ongoing_requests=_MANY,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=config.drain_seconds,
    )
    capacity = most * at_once + config.max_queue
    model = config.served_name or name_of(engine.model)
    workers = replica.bind(asdict(engine), config.stall_seconds)
    bound: serve.Application = gateway.bind(asdict(config), model, capacity, workers)
    return bound


def serve_replicas(
    config: ServeConfig, engine: EngineConfig, *, replicas: int, max_replicas: int | None
) -> None:
    """Serve on the cluster that RAY_ADDRESS names, or on one of this machine, until a signal."""
    logs.set_up(config.log_format)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    application = build(config, engine, replicas=replicas, max_replicas=max_replicas)
    with listen(config.host, config.port) as door:  # a port that is taken is found out here
        port = door.getsockname()[1]
    if not ray.is_initialized():
        ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):  # in place of Ray's own
        signal.signal(number, lambda *_: stopped.set())
    try:
        serve.start(http_options={"host": config.host, "port": port})
        serve.run(application, name="lopa", route_prefix="/")
        log.info("listening", extra={"url": f"http://{config.host}:{port}", "replicas": replicas})
        stopped.wait()
        log.info("stopping")
    except RuntimeError as error:  # what Serve makes of a deployment that does not come up
        raise LopaError(f"the replicas do not start: {_last_line(error)}") from None
    finally:
        _shut_down()
    log.info("stopped")


def _shut_down() -> None:
    stop: Any = serve.shutdown
    stop()
    ray.shutdown()


def _last_line(error: Exception) -> str:
    return str(error).strip().splitlines()[-1]
