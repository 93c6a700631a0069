"""The server's settings. The only place where their defaults are written."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lopa.errors import ConfigError

LOG_FORMATS = ("plain", "json")
HEALTH_SECONDS = 5.0  # silence after which an engine is not ready
_MAX_KEY_FILE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What an engine process is started with. None leaves a value to the engine's defaults."""

    model: str
    llm: dict[str, Any] = field(default_factory=dict)  # other arguments of `LLM`
    preset: str | None = None
    decoding: dict[str, Any] = field(default_factory=dict)  # default options of requests
    max_running: int | None = None
    token_budget: int | None = None
    max_request_tokens: int | None = None
    branch_parallel: int = 1
    tensor_parallel: int = 1
    rank_timeout: float | None = None

    def __post_init__(self) -> None:
        for name, least in (("max_running", 1), ("token_budget", 1), ("max_request_tokens", 2)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} must be at least {least}: got {value}")

    @property
    def ranks(self) -> int:
        return self.branch_parallel * self.tensor_parallel


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    host: str = "127.0.0.1"
    port: int = 8000
    served_name: str | None = None  # the model's name in the API
    ssl_certfile: str | None = None  # serves HTTPS
    ssl_keyfile: str | None = None  # None: the key is in `ssl_certfile`
    ssl_ca_certs: str | None = None  # clients must show a certificate that these have signed
    api_key: tuple[str, ...] = ()
    allowed_host: tuple[str, ...] = ()  # beside addresses, localhost and this machine's names
    cors_origin: tuple[str, ...] = ()
    max_connections: int = 512
    max_queue: int = 64  # sequences that may wait beside those that run
    max_body_bytes: int = 1 << 20
    max_choices: int = 16  # choices of one request: prompts × n
    request_seconds: float = 30.0  # for a request to arrive
    drain_seconds: float = 30.0
    health_seconds: float = HEALTH_SECONDS
    stall_seconds: float = 300.0
    scale_up_seconds: float = 30.0  # of high load before a replica is added
    scale_down_seconds: float = 600.0  # of low load before one is removed
    log_format: str | None = None  # None: plain on a terminal, else json

    def __post_init__(self) -> None:
        for name in ("max_queue", "max_body_bytes", "max_choices", "max_connections"):
            least = 0 if name == "max_queue" else 1
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}: got {getattr(self, name)}")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be between 0 and 65535: got {self.port}")
        if not self.drain_seconds >= 0:
            raise ConfigError(f"drain_seconds must be at least 0: got {self.drain_seconds}")
        for name in ("scale_up_seconds", "scale_down_seconds"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} must be at least 0: got {getattr(self, name)}")
        for name in ("request_seconds", "health_seconds", "stall_seconds"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0: got {getattr(self, name)}")
        if self.ssl_certfile is None and (self.ssl_keyfile or self.ssl_ca_certs):
            raise ConfigError("ssl_keyfile and ssl_ca_certs go with ssl_certfile: give it too")
        if any(not key.strip() for key in self.api_key):
            raise ConfigError("an API key is empty: leave the option out to serve without keys")
        if "*" in self.cors_origin and self.api_key:
            raise ConfigError("with API keys, name the CORS origins: * would trust every page")
        if self.log_format not in (None, *LOG_FORMATS):
            raise ConfigError(f"log_format must be one of {', '.join(LOG_FORMATS)}")


def read_api_keys(path: str) -> tuple[str, ...]:
    """The keys of a file, one a line; empty lines and those that begin with # are left out."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(_MAX_KEY_FILE_BYTES)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"the API key file {path} cannot be read ({reason})") from None
    lines = [line.strip() for line in text.splitlines()]
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ConfigError(f"the API key file {path} holds no key: write one a line")
    return keys


def model_name(model: str) -> str:
    """The model's default name in the API: a hub id, or the last part of a folder's path."""
    folder = Path(model)
    return folder.resolve().name if folder.is_dir() else model
