"""Replicas over a Ray cluster, behind one gateway.

    serve run lopa.serving.ray:app model=tiny replicas=2 branch_parallel=2

The gateway is the same application with another backend. The resources of a replica are one bundle
of one placement group, a core and a device per rank, so that its ranks are never spread over nodes.
Ray shows them these devices and no others.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import ray
from fastapi import FastAPI
from pydantic import TypeAdapter, ValidationError
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from lopa.config import DecodeConfig
from lopa.errors import ConfigError, LopaError
from lopa.serving import logs
from lopa.serving.api.app import create_app
from lopa.serving.api.metrics import Metrics
from lopa.serving.api.server import listen
from lopa.serving.config import EngineConfig, ServeConfig, model_name, read_api_keys
from lopa.serving.ray.replica import REPLICA_QUEUE, Replica
from lopa.serving.ray.replica_pool import ReplicaPool
from lopa.serving.ray.replica_router import ReplicaRouter

log = logging.getLogger("lopa.serving")

_APP_NAME = "lopa"
# Options of a server that has its own connections.
_NOT_FOR_SERVE = {
    *("host", "port", "log_format", "max_connections", "request_seconds"),
    *("ssl_certfile", "ssl_keyfile", "ssl_ca_certs"),
}
_SHUTDOWN_POLL_SECONDS = 0.25
_GATEWAY_MAX_REQUESTS = 100_000  # no limit of Serve's: the gateway checks its capacity itself
_PROXY_READY_SECONDS = "60"  # Serve's default of 5 is too short for a busy machine
_LOOK_BACK_SECONDS = (11.0, 30.0)  # bounds of the average of the load: Serve wants more than 10


class Gateway:
    """The application on a cluster."""

    def __init__(
        self, config: dict[str, Any], model: str, capacity: int, replicas: DeploymentHandle[Any]
    ) -> None:
        logs.set_up("json")
        metrics = Metrics()
        self._pool = ReplicaPool(replicas, metrics, capacity)
        self._app = create_app(self._pool, metrics, ServeConfig(**config), model)

    async def drain(self, seconds: float) -> None:
        """Accept no more requests; those that run may finish for so long, then they fail."""
        self._pool.drain(seconds)
        end = time.monotonic() + seconds
        while self._pool.requests() and time.monotonic() < end:
            await asyncio.sleep(0.05)
        await self._pool.stop()

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._app


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """What `serve run` takes beside the options of `lopa serve`."""

    replicas: int = 1
    max_replicas: int | None = None
    gpus: float = 0  # per replica


def app(arguments: dict[str, str]) -> serve.Application:
    """For `serve run`: the options of `lopa serve` by name, those of `DecodeConfig` included."""
    given = {"model": "tiny", **arguments}
    keys = given.pop("api_key", os.environ.get("LOPA_API_KEY", "")).split()
    if key_file := given.pop("api_key_file", os.environ.get("LOPA_API_KEY_FILE", "")):
        keys += read_api_keys(key_file)
    lists = {name: given.pop(name, "").split() for name in ("allowed_host", "cors_origin")}
    llm = _pop(given, ("adapter", "device", "dtype", "quantize", "cache_tokens", "warmup"))
    engine_options = _pop(given, _names(EngineConfig) - {"llm", "decoding"})
    cluster_options = _pop(given, _names(Arguments))
    server_options = _pop(given, _names(ServeConfig) - _NOT_FOR_SERVE)
    decoding = _pop(given, _names(DecodeConfig))
    if given:
        raise ConfigError(f"unknown option {min(given)}: see lopa serve --help")
    try:
        cluster = TypeAdapter(Arguments).validate_python(cluster_options)
        config = TypeAdapter(ServeConfig).validate_python(
            {**server_options, "api_key": keys, **lists}
        )
        engine = TypeAdapter(EngineConfig).validate_python(
            {
                "llm": {name: _parse(value) for name, value in llm.items()},
                "decoding": {name: _parse(value) for name, value in decoding.items()},
                **engine_options,
            }
        )
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"{first['loc'][0]}: {first['msg']}") from None
    return build(config, engine, **asdict(cluster))


def _names(kind: Any) -> set[str]:
    return {field.name for field in fields(kind)}


def _pop(given: dict[str, Any], names: Any) -> dict[str, Any]:
    return {name: given.pop(name) for name in sorted(names) if name in given}


def _parse(text: Any) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(str(text).lower(), text)


def gpus_per_replica(engine: EngineConfig) -> int:
    """One per rank where the cluster has GPUs and the device may be one, else 0."""
    device = engine.llm.get("device") or "auto"
    if device.startswith("cuda:"):
        raise ConfigError(f"Ray assigns the GPUs: give --device cuda, not {device}")
    if device not in ("auto", "cuda"):
        return 0
    available = ray.cluster_resources().get("GPU", 0)
    if device == "cuda" and not available:
        raise ConfigError("the cluster has no GPU: leave --device out, or give --device cpu")
    return engine.ranks if available else 0


def check_replicas(replicas: int, max_replicas: int | None) -> None:
    if replicas < 1 or (max_replicas is not None and max_replicas < replicas):
        raise ConfigError("replicas must be at least 1, and max_replicas no fewer than that")


def build(
    config: ServeConfig,
    engine: EngineConfig,
    *,
    replicas: int,
    max_replicas: int | None = None,
    gpus: float = 0,
) -> serve.Application:
    """The gateway and its replicas; Serve adds replicas, up to `max_replicas`, under load.

    A replica has one core per rank, and `gpus` devices.
    """
    from lopa.engine.base import MAX_RUNNING

    check_replicas(replicas, max_replicas)
    max_running = engine.max_running or MAX_RUNNING
    scaling: dict[str, Any] = {"num_replicas": replicas}
    if max_replicas is not None:
        shortest, longest = _LOOK_BACK_SECONDS
        scaling = {
            "autoscaling_config": {
                "min_replicas": replicas,
                "max_replicas": max_replicas,
                "target_ongoing_requests": max_running,
                "upscale_delay_s": config.scale_up_seconds,
                "downscale_delay_s": config.scale_down_seconds,
                "look_back_period_s": min(max(config.scale_up_seconds, shortest), longest),
            }
        }
    replica: Any = serve.deployment(
        Replica,
        name="replica",
        **scaling,
        max_ongoing_requests=max_running + REPLICA_QUEUE,
        ray_actor_options={"num_cpus": engine.ranks, "num_gpus": gpus},
        placement_group_bundles=[bundle(engine, gpus)],
        placement_group_strategy="STRICT_PACK",
        request_router_config=RequestRouterConfig(
            request_router_class=f"{ReplicaRouter.__module__}.{ReplicaRouter.__qualname__}"
        ),
        health_check_period_s=2,
        health_check_timeout_s=10,
        graceful_shutdown_wait_loop_s=_SHUTDOWN_POLL_SECONDS,
        graceful_shutdown_timeout_s=config.drain_seconds,
    )
    gateway: Any = serve.deployment(
        serve.ingress()(Gateway),
        name="gateway",
        max_ongoing_requests=_GATEWAY_MAX_REQUESTS,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_wait_loop_s=_SHUTDOWN_POLL_SECONDS,
        graceful_shutdown_timeout_s=config.drain_seconds,
    )
    capacity = (max_replicas or replicas) * max_running + config.max_queue
    model = config.served_name or model_name(engine.model)
    bound_replica = replica.bind(asdict(engine), config.stall_seconds, config.health_seconds)
    application: serve.Application = gateway.bind(asdict(config), model, capacity, bound_replica)
    return application


def bundle(engine: EngineConfig, gpus: float) -> dict[str, float]:
    """The resources of a replica."""
    return {"CPU": float(engine.ranks), **({"GPU": float(gpus)} if gpus else {})}


def serve_replicas(
    config: ServeConfig, engine: EngineConfig, *, replicas: int, max_replicas: int | None
) -> None:
    """Serve on the cluster at RAY_ADDRESS, or on one started here, until a signal."""
    check_replicas(replicas, max_replicas)
    logs.set_up(config.log_format)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    with listen(config.host, config.port) as listening_socket:  # fails early when the port is taken
        port = listening_socket.getsockname()[1]
    log.info("starting", extra={"replicas": replicas, "ranks": engine.ranks})
    _join(cores=(max_replicas or replicas) * engine.ranks)
    up, stopped = threading.Event(), threading.Event()

    def stop(*_: Any) -> None:
        if stopped.is_set() or not up.is_set():
            raise KeyboardInterrupt  # the second signal, or nothing runs yet
        stopped.set()

    for number in (signal.SIGINT, signal.SIGTERM):  # instead of Ray's handlers
        signal.signal(number, stop)
    try:
        gpus = gpus_per_replica(engine)
        _check_capacity(bundle(engine, gpus), replicas)
        application = build(config, engine, replicas=replicas, max_replicas=max_replicas, gpus=gpus)
        _start(config.host, port)
        serve.run(application, name=_APP_NAME, route_prefix="/")
        up.set()
        log.info("listening", extra={"url": f"http://{config.host}:{port}", "replicas": replicas})
        stopped.wait()
        log.info("stopping")
        # Drain first: Serve would close the connections.
        serve.get_app_handle(_APP_NAME).drain.remote(config.drain_seconds).result()
        serve.delete(_APP_NAME)
    except RuntimeError as error:  # Serve's, when a deployment does not come up
        raise LopaError(f"the replicas do not start: {_failure_reason(error)}") from None
    finally:
        _shut_down()
    log.info("stopped")


def _join(cores: int) -> None:
    """Join the cluster at RAY_ADDRESS, or start one here with at least so many logical cores.

    Where there are more ranks than cores they share them, as without a cluster.
    """
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    address = os.environ.get("RAY_ADDRESS")
    if not address:
        count = max(cores, os.cpu_count() or 1)
        os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", _PROXY_READY_SECONDS)
        ray.init(address="local", num_cpus=count, include_dashboard=False, **quiet)
        return
    try:
        ray.init(address=address, **quiet)
    except ConnectionError:
        raise LopaError(
            f"cannot join the Ray cluster at {address}: is it up, and does it ask for a token "
            "(RAY_AUTH_MODE)? Without RAY_ADDRESS one is started here"
        ) from None


def _start(host: str, port: int) -> None:
    """Start Ray Serve and its HTTP proxy."""
    try:
        serve.start(http_options={"host": host, "port": port})
    except RayError as error:
        raise LopaError(
            f"Ray Serve does not come up ({type(error).__name__}): try again, or on a less busy "
            "machine"
        ) from None


def _check_capacity(resources: Mapping[str, float], replicas: int) -> None:
    """Fail where replicas would wait for nodes that will never come."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    capacity = sum(min(int(node.get(k, 0) // n) for k, n in resources.items()) for node in nodes)
    if capacity >= replicas:
        return
    each = " and ".join(f"{count:g} {name}" for name, count in resources.items())
    message = f"capacity for {capacity} of {replicas} replicas, each with {each} on one node"
    if not os.environ.get("RAY_ADDRESS"):
        raise LopaError(f"the cluster has {message}: ask for fewer, or give --device cpu")
    log.warning(f"the cluster has {message}: the others wait for nodes")


def _shut_down() -> None:
    stop: Any = serve.shutdown
    stop()
    ray.shutdown()


def _failure_reason(error: RuntimeError) -> str:
    """The message of the last replica that failed, or else Serve's."""
    application = serve.status().applications.get(_APP_NAME)
    deployments = application.deployments if application else {}
    message = deployments["replica"].message if deployments else ""
    last: str = (message or str(error)).strip().splitlines()[-1]
    return last.removeprefix(f"{LopaError.__module__}.{LopaError.__name__}: ")
