"""`lopa serve` on one machine: a listening socket, signals, and a graceful shutdown.

On SIGTERM or SIGINT there are no new connections, and running requests may finish for
`drain_seconds`; those that have not are failed then. A second signal fails them at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import resource
import signal
import socket
import ssl
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any

import uvicorn

from lopa.errors import ConfigError, LopaError
from lopa.serving import logs
from lopa.serving.api.app import create_app
from lopa.serving.api.connection import Connection, ConnectionLimits
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
        engine,
        metrics,
        max_queue=config.max_queue,
        stall_seconds=config.stall_seconds,
        health_seconds=config.health_seconds,
    )
    model = config.served_name or model_name(engine.model)
    limits = ConnectionLimits(config.max_connections, config.request_seconds)
    connection: Any = partial(Connection, limits=limits)  # h11: httptools does not limit headers
    server_config = uvicorn.Config(
        create_app(client, metrics, config, model),
        http=connection,
        ws="none",
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=int(config.drain_seconds + _FLUSH_SECONDS + 1),
        server_header=False,
        ssl_certfile=config.ssl_certfile,
        ssl_keyfile=config.ssl_keyfile,
        ssl_ca_certs=config.ssl_ca_certs,
        ssl_cert_reqs=ssl.CERT_NONE if config.ssl_ca_certs is None else ssl.CERT_REQUIRED,
    )
    _load_certificates(server_config)
    server = _Server(server_config, client, config)
    host, port = listening_socket.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    scheme = "http" if config.ssl_certfile is None else "https"
    log.info("listening", extra={"url": f"{scheme}://{shown}:{port}", "model": model})
    if not config.api_key and not _is_loopback(host):
        log.warning("no API key: everybody who reaches this address can use it; set LOPA_API_KEY")
    start_failed = asyncio.create_task(client.start_failed.wait())
    start_failed.add_done_callback(lambda _: server.stop())
    _allow_open_files()
    gc.freeze()  # objects so far are permanent: scanning them takes 10 ms per collection
    await server.serve(sockets=[listening_socket])
    start_failed.cancel()
    if client.start_error is not None:
        message, wrong_option = client.start_error
        raise (ConfigError if wrong_option else LopaError)(message)
    log.info("stopped")


class _Server(uvicorn.Server):
    def __init__(
        self, server_config: uvicorn.Config, client: EngineClient, config: ServeConfig
    ) -> None:
        super().__init__(server_config)
        self._client = client
        self._drain_seconds = config.drain_seconds
        self._handshake_seconds = config.request_seconds
        self._loop = asyncio.get_running_loop()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn's, which has no limit on the time of a TLS handshake."""
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            raise LopaError("the server does not start: its log says why")
        connection: Any = self.config.http_protocol_class
        protocol = partial(
            connection,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        context = self.config.ssl
        seconds = None if context is None else self._handshake_seconds
        self.servers = [
            await self._loop.create_server(
                protocol,
                sock=sock,
                ssl=context,
                backlog=self.config.backlog,
                ssl_handshake_timeout=seconds,
            )
            for sock in sockets or ()
        ]
        self.started = True

    def stop(self) -> None:
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Until the process exits: uvicorn restores the default handlers before that.

        A late SIGTERM would then kill a server that has stopped in good order.
        """
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.handle_exit)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True
        self._loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        if self.force_exit:
            self._client.fail_all(_SHUTDOWN)
            return
        log.info("stopping", extra={"running": len(self._client.requests())})
        self._client.drain(self._drain_seconds)
        self._loop.call_later(self._drain_seconds, self._client.fail_all, _SHUTDOWN)


def _allow_open_files() -> None:
    """As many as the system lets this user have: a connection is an open file."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _load_certificates(config: uvicorn.Config) -> None:
    try:
        config.load()
    except OSError as error:  # of files or of what is in them
        raise ConfigError(
            f"the TLS certificate cannot be used ({error}): check --ssl-certfile, --ssl-keyfile "
            "and --ssl-ca-certs"
        ) from None


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
