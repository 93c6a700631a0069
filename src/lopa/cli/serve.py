"""`lopa serve`: OpenAI's API on a model. Every option has a twin in the environment, LOPA_…"""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any

import typer

from lopa.cli.options import (
    AdapterOption,
    BranchParallelOption,
    DeviceOption,
    DtypeOption,
    Given,
    ModelOption,
    PresetOption,
    QuantizeOption,
    RankTimeoutOption,
    TensorParallelOption,
    default_model,
    with_decoding,
)
from lopa.distributed.launch import launched
from lopa.errors import ConfigError, LopaError
from lopa.serving.config import EngineConfig, ServeConfig

ENVIRONMENT = "LOPA"  # the prefix of the twins
_DEFAULTS = {field.name: field.default for field in fields(ServeConfig)}
_ADDRESS, _ACCESS, _LIMITS, _RUNNING = "Address", "Access", "Limits", "Running"


def _option(name: str, line: str, panel: str, metavar: str | None = None) -> Any:
    """The option for a field of ServeConfig; its default is the field's."""
    default = _DEFAULTS.get(name)
    return typer.Option(
        "--" + name.replace("_", "-"),
        help=f"{line} (default: {default})." if default not in (None, ()) else f"{line}.",
        show_default=False,
        rich_help_panel=panel,
        metavar=metavar,
    )


@with_decoding()
def serve(
    decoding: Given,
    model: ModelOption = None,
    adapter: AdapterOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    quantize: QuantizeOption = None,
    preset: PresetOption = None,
    branch_parallel: BranchParallelOption = None,
    tensor_parallel: TensorParallelOption = None,
    rank_timeout: RankTimeoutOption = None,
    host: Annotated[str | None, _option("host", "Address to listen on", _ADDRESS)] = None,
    port: Annotated[
        int | None, _option("port", "Port to listen on; 0 takes a free one", _ADDRESS)
    ] = None,
    served_name: Annotated[
        str | None,
        _option("served_name", "What requests call the model (default: its own name)", _ADDRESS),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        _option(
            "api_key",
            "Ask for this key; may be repeated. In the environment, where others on this machine "
            "cannot read it, separated by spaces",
            _ACCESS,
            "TEXT",
        ),
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        _option("cors_origin", "Let web pages of this origin in; may be repeated", _ACCESS, "TEXT"),
    ] = None,
    max_running: Annotated[
        int | None, _option("max_running", "Answers decoded at once", _LIMITS)
    ] = None,
    max_queue: Annotated[
        int | None, _option("max_queue", "Answers that may wait beside those", _LIMITS)
    ] = None,
    token_budget: Annotated[
        int | None, _option("token_budget", "Tokens forwarded in a round", _LIMITS)
    ] = None,
    cache_tokens: Annotated[
        int | None,
        _option(
            "cache_tokens", "Room of the cache (default: what the device's memory allows)", _LIMITS
        ),
    ] = None,
    warmup: Annotated[
        int | None,
        _option(
            "warmup",
            "On a GPU: be ready only when rounds of up to so many tokens are fast; else the first "
            "of each size takes longer",
            _LIMITS,
        ),
    ] = None,
    max_request_tokens: Annotated[
        int | None,
        _option(
            "max_request_tokens", "Prompt and answer of a request (default: the context)", _LIMITS
        ),
    ] = None,
    max_body_bytes: Annotated[
        int | None, _option("max_body_bytes", "Size of a request's body", _LIMITS)
    ] = None,
    max_choices: Annotated[
        int | None, _option("max_choices", "Answers in a request, prompts times n", _LIMITS)
    ] = None,
    replicas: Annotated[
        int | None,
        _option("replicas", "Serve this many replicas, over a Ray cluster", _RUNNING),
    ] = None,
    max_replicas: Annotated[
        int | None,
        _option("max_replicas", "With --replicas: start more, up to this, as needed", _RUNNING),
    ] = None,
    scale_up_seconds: Annotated[
        float | None,
        _option("scale_up_seconds", "With --max-replicas: load that asks for more", _RUNNING),
    ] = None,
    scale_down_seconds: Annotated[
        float | None,
        _option("scale_down_seconds", "With --max-replicas: time before fewer do", _RUNNING),
    ] = None,
    drain_seconds: Annotated[
        float | None,
        _option("drain_seconds", "Time that answers have left when the server stops", _RUNNING),
    ] = None,
    stall_seconds: Annotated[
        float | None,
        _option("stall_seconds", "Silence after which a busy engine is started again", _RUNNING),
    ] = None,
    log_format: Annotated[
        str | None,
        _option("log_format", "plain or json (default: plain on a terminal, else json)", _RUNNING),
    ] = None,
) -> None:
    """Serve a model over OpenAI's API. Every option may be given as a variable: LOPA_PORT, …"""
    given: dict[str, Any] = {
        "host": host,
        "port": port,
        "served_name": served_name,
        "api_key": tuple(api_key or ()),
        "cors_origin": tuple(cors_origin or ()),
        "max_queue": max_queue,
        "max_body_bytes": max_body_bytes,
        "max_choices": max_choices,
        "scale_up_seconds": scale_up_seconds,
        "scale_down_seconds": scale_down_seconds,
        "drain_seconds": drain_seconds,
        "stall_seconds": stall_seconds,
        "log_format": log_format,
    }
    config = ServeConfig(**{name: value for name, value in given.items() if value is not None})
    of_llm = {
        "adapter": adapter,
        "device": device,
        "dtype": dtype,
        "quantize": quantize,
        "cache_tokens": cache_tokens,
        "warmup": warmup,
    }
    engine = EngineConfig(
        model=model or default_model(),
        llm={name: value for name, value in of_llm.items() if value is not None},
        preset=preset,
        decoding=dict(decoding),
        max_running=max_running,
        token_budget=token_budget,
        max_request_tokens=max_request_tokens,
        branch_parallel=branch_parallel or 1,
        tensor_parallel=tensor_parallel or 1,
        rank_timeout=rank_timeout,
    )
    if launched() is not None:
        raise ConfigError("lopa serve starts ranks of its own: run it without torchrun")
    if replicas is None and max_replicas is not None:
        raise ConfigError("max-replicas goes with --replicas: give both")
    if max_replicas is None and (scale_up_seconds, scale_down_seconds) != (None, None):
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
