"""`lopa serve` on one machine: a listening socket, signals, and a graceful shutdown.

On SIGTERM or SIGINT there are no new connections, and running requests may finish for
`drain_seconds`; those that have not are failed then. A second signal fails them at once.
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
from lopa.serving.api.engine_client import EngineClient
from lopa.serving.api.metrics import Metrics
from lopa.serving.config import EngineConfig, ServeConfig, model_name
from lopa.serving.jobs import Failed

log = logging.getLogger("lopa.serving")

_FLUSH_SECONDS = 5.0  # for the errors of failed requests to reach their clients


def serve(config: ServeConfig, engine: EngineConfig) -> None:
    """Serve until a signal; LopaError when it cannot."""
    logs.set_up(config.log_format)
    with (
        listen(config.host, config.port) as listening_socket,
        asyncio.Runner(loop_factory=_loop_factory()) as runner,
    ):
        runner.run(_serve(config, engine, listening_socket))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's where it is installed: it takes half the time of asyncio's own."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


async def _serve(
    config: ServeConfig, engine: EngineConfig, listening_socket: socket.socket
) -> None:
    metrics = Metrics()
    client = EngineClient(
        engine, metrics, max_queue=config.max_queue, stall_seconds=config.stall_seconds
    )
    model = config.served_name or model_name(engine.model)
    server = _Server(
        uvicorn.Config(
            create_app(client, metrics, config, model),
            http="h11",  # httptools has no limit on the size of headers
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=int(config.drain_seconds + _FLUSH_SECONDS + 1),
            server_header=False,
        ),
        client,
        config.drain_seconds,
    )
    host, port = listening_socket.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    log.info("listening", extra={"url": f"http://{shown}:{port}", "model": model})
    if not config.api_key and not _is_loopback(host):
        log.warning("no API key: everybody who reaches this address can use it; set LOPA_API_KEY")
    start_failed = asyncio.create_task(client.start_failed.wait())
    start_failed.add_done_callback(lambda _: server.stop())
    gc.freeze()  # objects so far are permanent: scanning them takes 10 ms per collection
    await server.serve(sockets=[listening_socket])
    start_failed.cancel()
    if client.start_error is not None:
        message, wrong_option = client.start_error
        raise (ConfigError if wrong_option else LopaError)(message)
    log.info("stopped")


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, client: EngineClient, drain_seconds: float) -> None:
        super().__init__(config)
        self._client = client
        self._drain_seconds = drain_seconds
        self._loop = asyncio.get_running_loop()

    def stop(self) -> None:
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Not recorded, or uvicorn would raise the signal again at the end.
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True
        self._loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        if self.force_exit:
            self._client.fail_all(_SHUTDOWN)
            return
        log.info("stopping", extra={"running": len(self._client.requests())})
        self._client.drain()
        self._loop.call_later(self._drain_seconds, self._client.fail_all, _SHUTDOWN)


_SHUTDOWN = Failed(kind="shutdown", message="the server is shutting down: try again")


def listen(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        listening_socket = socket.create_server(address[:2], family=family, backlog=2048)
    except (OSError, OverflowError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise LopaError(
            f"cannot listen on {host} port {port} ({reason}): choose another --host or --port"
        ) from None
    # Connections inherit it. Without it the end of a response waits 40 ms for the client's ACK.
    # asyncio sets it only on sockets that it makes itself.
    listening_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening_socket


def _is_loopback(host: str) -> bool:
    return host == "::1" or host.startswith("127.")
