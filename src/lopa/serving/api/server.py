"""Serving for real: a listening socket, signals, and a way out that finishes what is running.

SIGTERM or SIGINT: no new connections, running answers are finished, for `drain_seconds` at most;
what is left then ends with an error. A second signal ends at once.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn

from lopa.errors import ConfigError, LopaError
from lopa.serving import logs
from lopa.serving.api.app import create_app
from lopa.serving.api.engine_client import Client
from lopa.serving.api.metrics import Metrics
from lopa.serving.config import EngineConfig, ServeConfig, name_of
from lopa.serving.jobs import Failed

log = logging.getLogger("lopa.serving")

_LAST_WORDS = 5.0  # seconds for the errors of what was cut off to reach their clients


def serve(config: ServeConfig, engine: EngineConfig) -> None:
    """Serve until a signal; LopaError when it cannot."""
    logs.set_up(config.log_format)
    with (
        listen(config.host, config.port) as door,
        asyncio.Runner(loop_factory=_loop_factory()) as runner,
    ):
        runner.run(_serve(config, engine, door))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's, which takes half the time of asyncio's own, where it is installed."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


async def _serve(config: ServeConfig, engine: EngineConfig, door: socket.socket) -> None:
    metrics = Metrics()
    client = Client(engine, metrics, max_queue=config.max_queue, stall_seconds=config.stall_seconds)
    model = config.served_name or name_of(engine.model)
    server = _Server(
        uvicorn.Config(
            create_app(client, metrics, config, model),
            http="h11",  # httptools, which may be installed too, takes headers of any size
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=int(config.drain_seconds + _LAST_WORDS + 1),
            server_header=False,
        ),
        client,
        config.drain_seconds,
    )
    host, port = door.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    log.info("listening", extra={"url": f"http://{shown}:{port}", "model": model})
    if not config.api_key and not _is_loopback(host):
        log.warning("anybody who reaches this address may use the model: set LOPA_API_KEY")
    failed = asyncio.create_task(client.gave_up.wait())
    failed.add_done_callback(lambda _: server.leave())
    gc.freeze()  # what is there now stays: no collection need look at it, 10 ms each
    await server.serve(sockets=[door])
    failed.cancel()
    if client.failure is not None:
        message, misuse = client.failure
        raise (ConfigError if misuse else LopaError)(message)
    log.info("stopped")


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, client: Client, drain_seconds: float) -> None:
        super().__init__(config)
        self._client = client
        self._drain_seconds = drain_seconds
        self._loop = asyncio.get_running_loop()

    def leave(self) -> None:
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Not recorded for uvicorn to raise again at the end: this is how the server is stopped.
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True
        self._loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        if self.force_exit:
            self._client.fail_all(_SHUTDOWN)
            return
        log.info("stopping", extra={"running": len(self._client.flows())})
        self._client.drain()
        self._loop.call_later(self._drain_seconds, self._client.fail_all, _SHUTDOWN)


_SHUTDOWN = Failed(kind="shutdown", message="the server is shutting down: ask again")


def listen(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        door = socket.create_server(address[:2], family=family, backlog=2048)
    except (OSError, OverflowError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise LopaError(
            f"cannot listen on {host} port {port} ({reason}): choose another --host or --port"
        ) from None
    # Connections inherit it. Without it the end of an answer waits 40 ms for the client's word
    # that it has the beginning; asyncio sees to this only for sockets that it makes itself.
    door.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return door


def _is_loopback(host: str) -> bool:
    return host == "::1" or host.startswith("127.")
