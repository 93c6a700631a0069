"""`lopa serve`: OpenAI's API on a model. Every option has an environment variable, LOPA_…"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, get_type_hints

from lopa.cli.options import (
    DecodeOptions,
    ModelOptions,
    ParallelOptions,
    option,
    with_decoding,
    with_model,
    with_options,
    with_parallel,
)
from lopa.config import WAITING_BRANCHES
from lopa.distributed.launch import launch_info
from lopa.errors import ConfigError, LopaError
from lopa.serving.config import EngineConfig, ServeConfig, read_api_keys

ENVIRONMENT = "LOPA"  # prefix of the variables
_SERVER = {field.name: field.default for field in fields(ServeConfig)}  # name → default
_ENGINE = ("max_running", "token_budget", "max_request_tokens")  # fields of EngineConfig
_LLM = ("cache_tokens", "warmup")  # arguments of LLM
# Option → the panel it is shown in, and its help. Defaults are those of ServeConfig.
_HELP = {
    "host": ("Address", "Address to listen on"),
    "port": ("Address", "Port to listen on; 0 takes a free one"),
    "served_name": ("Address", "Model name in the API (default: the model's own name)"),
    "api_key": (
        "Access",
        "API key that clients must send; may be repeated. Better as a variable, which other users "
        "of this machine cannot read: keys separated by spaces",
    ),
    "api_key_file": ("Access", "File of API keys, one a line"),
    "ssl_certfile": ("Access", "Serve HTTPS with this certificate (PEM)"),
    "ssl_keyfile": ("Access", "Its key (default: in the same file)"),
    "ssl_ca_certs": ("Access", "Let in clients with a certificate signed by one of these alone"),
    "allowed_host": (
        "Access",
        "Host name by which clients may address the server; may be repeated, * allows all. "
        "Addresses, localhost and this machine's name always may",
    ),
    "cors_origin": ("Access", "Origin of web pages to allow; may be repeated"),
    "max_connections": ("Limits", "Maximum connections"),
    "request_seconds": ("Limits", "Time for a request to arrive"),
    "max_running": ("Limits", "Maximum sequences decoded at once"),
    "max_queue": ("Limits", "Maximum sequences that wait; more are refused with 429"),
    "token_budget": ("Limits", "Maximum tokens forwarded per round"),
    "cache_tokens": ("Limits", "Capacity of the KV cache (default: what the memory allows)"),
    "warmup": (
        "Limits",
        "On a GPU: capture CUDA graphs of rounds up to this many tokens before serving; otherwise "
        "the first round of each size is slow",
    ),
    "max_request_tokens": ("Limits", "Maximum prompt and new tokens (default: the context)"),
    "max_body_bytes": ("Limits", "Maximum size of a request body"),
    "max_choices": ("Limits", "Maximum choices of a request: prompts × n"),
    "replicas": ("Running", "Serve this many replicas, over a Ray cluster"),
    "max_replicas": ("Running", "With --replicas: add replicas under load, up to this many"),
    "scale_up_seconds": ("Running", "With --max-replicas: high load before one is added"),
    "scale_down_seconds": ("Running", "With --max-replicas: low load before one is removed"),
    "drain_seconds": ("Running", "Time for running requests to finish at shutdown"),
    "health_seconds": ("Running", "Silence of the engine after which /health is 503"),
    "stall_seconds": ("Running", "Silence of the engine after which it is restarted"),
    "log_format": ("Running", "plain or json (default: plain on a terminal, else json)"),
}
_HINTS = {**get_type_hints(ServeConfig), "api_key_file": str}
_SINGLE = ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs", "max_connections", "request_seconds")


def _default(name: str) -> str:
    default = _SERVER.get(name)
    return "" if default in (None, ()) else str(default)


@with_decoding(branches=WAITING_BRANCHES)
@with_options(
    "given",
    [option(name, _HINTS.get(name, int), *_HELP[name], _default(name)) for name in _HELP],
)
@with_parallel()
@with_model()
def serve(
    model: ModelOptions,
    parallel: ParallelOptions,
    given: Mapping[str, Any],
    decoding: DecodeOptions,
) -> None:
    """Serve a model over OpenAI's API. Every option has an environment variable: LOPA_PORT, …"""
    server = {name: given[name] for name in _SERVER if name in given}
    for name in ("api_key", "allowed_host", "cors_origin"):
        server[name] = tuple(server.get(name, ()))
    if "api_key_file" in given:
        server["api_key"] += read_api_keys(given["api_key_file"])
    config = ServeConfig(**server)
    engine = EngineConfig(
        model=model.name,
        llm={**model.llm_options, **{name: given[name] for name in _LLM if name in given}},
        preset=model.preset,
        decoding=dict(decoding),
        branch_parallel=parallel.branch_parallel or 1,
        tensor_parallel=parallel.tensor_parallel or 1,
        rank_timeout=parallel.rank_timeout,
        **{name: given[name] for name in _ENGINE if name in given},
    )
    replicas, max_replicas = given.get("replicas"), given.get("max_replicas")
    if launch_info() is not None:
        raise ConfigError("lopa serve starts its own ranks: run it without torchrun")
    if replicas is None and max_replicas is not None:
        raise ConfigError("max-replicas goes with --replicas: give both")
    if replicas is not None and (single := [name for name in _SINGLE if name in given]):
        name = single[0].replace("_", "-")
        raise ConfigError(f"{name} does not go with --replicas, where Ray has the connections")
    if max_replicas is None and {"scale_up_seconds", "scale_down_seconds"} & given.keys():
        raise ConfigError("scale-up-seconds and scale-down-seconds go with --max-replicas: give it")
    extra = "serve" if replicas is None else "ray"
    try:
        if replicas is None:
            from lopa.serving.api.server import serve as run

            run(config, engine)
        else:
            from lopa.serving.ray.deployment import serve_replicas

            serve_replicas(config, engine, replicas=replicas, max_replicas=max_replicas)
    except ImportError as error:
        raise LopaError(f"this needs {error.name}: pip install 'lopa[{extra}]'") from None
