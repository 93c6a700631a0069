"""Replicas over a Ray cluster, behind one gateway.

    serve run lopa.serving.ray:app model=tiny replicas=2 branch_parallel=2

The gateway is the same application with another backend. A replica's resources are one bundle of
one placement group, a core and a device for each of its ranks, so that processes that talk all the
time are never spread over nodes; Ray shows them these devices and no others.
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
from ray.serve.handle import DeploymentHandle

from lopa.config import DecodeConfig
from lopa.errors import ConfigError, LopaError
from lopa.serving import logs
from lopa.serving.api.app import create_app
from lopa.serving.api.metrics import Metrics
from lopa.serving.api.server import listen
from lopa.serving.config import EngineConfig, ServeConfig, name_of
from lopa.serving.ray.replica import SLACK, Replica
from lopa.serving.ray.replica_pool import Cluster

log = logging.getLogger("lopa.serving")

_NAME = "lopa"  # of the application
_LOOK_EVERY = 0.25  # seconds between looks at whether one that is to end has finished
_MANY = 100_000  # the gateway has limits of its own
_PATIENCE = "60"  # seconds: as long as Serve waits for its door, which it ends itself after five
_WINDOW = (11.0, 30.0)  # seconds over which load is averaged, least and most: Serve wants over 10


class Gateway:
    """The application on a cluster."""

    def __init__(
        self, config: dict[str, Any], model: str, capacity: int, replicas: DeploymentHandle[Any]
    ) -> None:
        logs.set_up("json")
        metrics = Metrics()
        self._cluster = Cluster(replicas, metrics, capacity)
        self._app = create_app(self._cluster, metrics, ServeConfig(**config), model)

    async def drain(self, seconds: float) -> None:
        """Take no more, and finish what there is; what is left after so long ends in an error."""
        self._cluster.drain()
        end = time.monotonic() + seconds
        while self._cluster.flows() and time.monotonic() < end:
            await asyncio.sleep(0.05)
        await self._cluster.stop()

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._app


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """What `serve run` takes beside options of `lopa serve`."""

    replicas: int = 1
    max_replicas: int | None = None
    gpus: float = 0  # of a replica; what the cluster has is not known yet


def app(arguments: dict[str, str]) -> serve.Application:
    """For `serve run`: options of `lopa serve` by name, those of `DecodeConfig` included."""
    given = {"model": "tiny", **arguments}
    keys = given.pop("api_key", os.environ.get("LOPA_API_KEY", ""))
    origins = given.pop("cors_origin", "")
    of_llm = _taken(given, ("adapter", "device", "dtype", "quantize", "cache_tokens", "warmup"))
    of_engine = _taken(given, _names(EngineConfig) - {"llm", "decoding"})
    of_cluster = _taken(given, _names(Arguments))
    of_server = _taken(given, _names(ServeConfig) - {"host", "port", "log_format"})
    decoding = _taken(given, _names(DecodeConfig))
    if given:
        raise ConfigError(f"unknown option {min(given)}: see lopa serve --help")
    try:
        own = TypeAdapter(Arguments).validate_python(of_cluster)
        config = TypeAdapter(ServeConfig).validate_python(
            {**of_server, "api_key": keys.split(), "cors_origin": origins.split()}
        )
        engine = TypeAdapter(EngineConfig).validate_python(
            {
                "llm": {name: _number(value) for name, value in of_llm.items()},
                "decoding": {name: _number(value) for name, value in decoding.items()},
                **of_engine,
            }
        )
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"{first['loc'][0]}: {first['msg']}") from None
    return build(
        config, engine, replicas=own.replicas, max_replicas=own.max_replicas, gpus=own.gpus
    )


def _names(kind: Any) -> set[str]:
    return {field.name for field in fields(kind)}


def _taken(given: dict[str, Any], names: Any) -> dict[str, Any]:
    return {name: given.pop(name) for name in sorted(names) if name in given}


def _number(text: Any) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(str(text).lower(), text)


def gpus_of(engine: EngineConfig) -> int:
    """GPUs of a replica: one a rank where the cluster has any, unless it is to run elsewhere."""
    device = engine.llm.get("device") or "auto"
    if device.startswith("cuda:"):
        raise ConfigError(f"the cluster says which GPU is whose: give --device cuda, not {device}")
    if device not in ("auto", "cuda"):
        return 0
    found = ray.cluster_resources().get("GPU", 0)
    if device == "cuda" and not found:
        raise ConfigError("the cluster has no GPU: leave --device out, or give --device cpu")
    return engine.ranks if found else 0


def check(replicas: int, max_replicas: int | None) -> None:
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
    """The gateway and its replicas; more of them, up to `max_replicas`, as requests wait.

    A replica has a core for each of its ranks, and `gpus` devices.
    """
    from lopa.engine.base import MAX_RUNNING

    check(replicas, max_replicas)
    at_once = engine.max_running or MAX_RUNNING
    most = max_replicas or replicas
    scaling: dict[str, Any] = {"num_replicas": replicas}
    if max_replicas is not None:
        least_window, most_window = _WINDOW
        scaling = {
            "autoscaling_config": {
                "min_replicas": replicas,
                "max_replicas": max_replicas,
                "target_ongoing_requests": at_once,
                "upscale_delay_s": config.scale_up_seconds,
                "downscale_delay_s": config.scale_down_seconds,
                "look_back_period_s": min(max(config.scale_up_seconds, least_window), most_window),
            }
        }
    replica: Any = serve.deployment(
        Replica,
        name="replica",
        **scaling,
        max_ongoing_requests=at_once + SLACK,
        ray_actor_options={"num_cpus": engine.ranks, "num_gpus": gpus},
        placement_group_bundles=[bundle(engine, gpus)],
        placement_group_strategy="STRICT_PACK",
        health_check_period_s=2,
        health_check_timeout_s=10,
        graceful_shutdown_wait_loop_s=_LOOK_EVERY,
        graceful_shutdown_timeout_s=config.drain_seconds,
    )
    gateway: Any = serve.deployment(
        serve.ingress()(Gateway),
        name="gateway",
        max_ongoing_requests=_MANY,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_wait_loop_s=_LOOK_EVERY,
        graceful_shutdown_timeout_s=config.drain_seconds,
    )
    capacity = most * at_once + config.max_queue
    model = config.served_name or name_of(engine.model)
    workers = replica.bind(asdict(engine), config.stall_seconds)
    bound: serve.Application = gateway.bind(asdict(config), model, capacity, workers)
    return bound


def bundle(engine: EngineConfig, gpus: float) -> dict[str, float]:
    """What a replica takes of a node."""
    return {"CPU": float(engine.ranks), **({"GPU": float(gpus)} if gpus else {})}


def serve_replicas(
    config: ServeConfig, engine: EngineConfig, *, replicas: int, max_replicas: int | None
) -> None:
    """Serve on the cluster that RAY_ADDRESS names, or on one of this machine, until a signal."""
    check(replicas, max_replicas)
    logs.set_up(config.log_format)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    with listen(config.host, config.port) as door:  # a port that is taken is found out here
        port = door.getsockname()[1]
    log.info("starting", extra={"replicas": replicas, "ranks": engine.ranks})
    _join(cores=(max_replicas or replicas) * engine.ranks)
    up, stopped = threading.Event(), threading.Event()

    def leave(*_: Any) -> None:
        if stopped.is_set() or not up.is_set():
            raise KeyboardInterrupt  # the second time, or there is nothing to be finished yet
        stopped.set()

    for number in (signal.SIGINT, signal.SIGTERM):  # in place of Ray's own
        signal.signal(number, leave)
    try:
        gpus = gpus_of(engine)
        _check_room(bundle(engine, gpus), replicas)
        application = build(config, engine, replicas=replicas, max_replicas=max_replicas, gpus=gpus)
        _start(config.host, port)
        serve.run(application, name=_NAME, route_prefix="/")
        up.set()
        log.info("listening", extra={"url": f"http://{config.host}:{port}", "replicas": replicas})
        stopped.wait()
        log.info("stopping")
        # Not left to the end of Serve, which cuts connections first.
        serve.get_app_handle(_NAME).drain.remote(config.drain_seconds).result()
        serve.delete(_NAME)
    except RuntimeError as error:  # what Serve makes of a deployment that does not come up
        raise LopaError(f"the replicas do not start: {_why(error)}") from None
    finally:
        _shut_down()
    log.info("stopped")


def _join(cores: int) -> None:
    """Join the cluster of RAY_ADDRESS, or start one here that counts so many cores at least.

    Ranks that are more than the cores share them, as they do without a cluster.
    """
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    address = os.environ.get("RAY_ADDRESS")
    if not address:
        count = max(cores, os.cpu_count() or 1)
        os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", _PATIENCE)
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
    """Serve itself, with its door."""
    try:
        serve.start(http_options={"host": host, "port": port})
    except RayError as error:
        raise LopaError(
            f"Ray Serve does not come up ({type(error).__name__}): try again, or where less is "
            "going on"
        ) from None


def _check_room(wanted: Mapping[str, float], replicas: int) -> None:
    """Replicas that find no room wait for it: no good where none will ever come."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    room = sum(min(int(node.get(k, 0) // n) for k, n in wanted.items()) for node in nodes)
    if room >= replicas:
        return
    each = " and ".join(f"{count:g} {name}" for name, count in wanted.items())
    message = f"there is room for {room} of {replicas} replicas, {each} on one node for each"
    if not os.environ.get("RAY_ADDRESS"):
        raise LopaError(f"{message}: ask for fewer, or give --device cpu")
    log.warning(f"{message}: the others wait for nodes")


def _shut_down() -> None:
    stop: Any = serve.shutdown
    stop()
    ray.shutdown()


def _why(error: RuntimeError) -> str:
    """What the last replica that failed had to say, or else Serve."""
    found = serve.status().applications.get(_NAME)
    said = found.deployments["replica"].message if found and found.deployments else ""
    last: str = (said or str(error)).strip().splitlines()[-1]
    return last.removeprefix(f"{LopaError.__module__}.{LopaError.__name__}: ")
