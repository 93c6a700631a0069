"""Options that commands share. Those for decoding are made from the fields of `DecodeConfig`.

No default is written here: an option left out is None and is not passed on, so the dataclass
decides, and the help reads from it what it would decide.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

import typer

from lopa.config import PRESETS, RANK_TIMEOUT, DecodeConfig, DecoderName
from lopa.models.files import BUILT_IN
from lopa.option_help import FIELDS

Given: TypeAlias = Mapping[str, Any]  # the fields of DecodeConfig that were given

_UNTRAINED = "dummy:dream-tiny"


def default_model() -> str:
    """The built-in model; random weights where it is not installed."""
    return "tiny" if (BUILT_IN["tiny"] / "config.json").exists() else _UNTRAINED


ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        help="tiny, a folder, a hub id, or dummy:NAME for random weights "
        f"(default: {default_model()}).",
        rich_help_panel="Model",
    ),
]
AdapterOption = Annotated[
    str | None,
    typer.Option(help="PEFT LoRA to merge: a folder or a hub id.", rich_help_panel="Model"),
]
DeviceOption = Annotated[
    str | None,
    typer.Option(
        help="cpu, cuda, cuda:1, mps, npu (default: the first accelerator, else the CPU).",
        rich_help_panel="Model",
    ),
]
DtypeOption = Annotated[
    str | None,
    typer.Option(
        help="float32, bfloat16, float16, float64 (default: the checkpoint's own).",
        rich_help_panel="Model",
    ),
]
QuantizeOption = Annotated[
    str | None,
    typer.Option(
        help="fp8 or int8 for the linear layers; as the dtype says by default.",
        rich_help_panel="Model",
    ),
]
PresetOption = Annotated[
    str | None,
    typer.Option(
        help=f"Settings published with the paper, the other options on top: {', '.join(PRESETS)}.",
        rich_help_panel="Decoding",
    ),
]
ChatOption = Annotated[
    bool,
    typer.Option(
        "--chat", help="Put the prompt through the model's chat template as a user's message."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
TraceOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write every round to FILE as JSON Lines.")
]

BranchParallelOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Replicas that share a round's branches (default: 1; under torchrun, all ranks).",
        rich_help_panel="Devices",
        show_default=False,
    ),
]
TensorParallelOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Devices that share each replica (default: 1).",
        rich_help_panel="Devices",
        show_default=False,
    ),
]
RankTimeoutOption = Annotated[
    float | None,
    typer.Option(
        min=0.1,
        metavar="SECONDS",
        help=f"A rank silent, or at one thing, for longer is lost (default: {RANK_TIMEOUT:g}).",
        rich_help_panel="Devices",
        show_default=False,
    ),
]


def with_decoding(*without: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command an option for every field of DecodeConfig but those named `without`.

    The command receives what was given as its argument `decoding`.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        names = [name for name in FIELDS if name not in without]
        signature = inspect.signature(command, eval_str=True)
        own = [p for name, p in signature.parameters.items() if name != "decoding"]

        @functools.wraps(command)
        def wrapped(**values: Any) -> None:
            given = {name: values.pop(name) for name in names}
            # An option that may be repeated is an empty list when it is left out.
            given = {name: value for name, value in given.items() if value not in (None, [])}
            command(**values, decoding=given)

        options = [_parameter(name) for name in names]
        wrapped.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*own, *options]
        )
        return wrapped

    return decorate


def decode_config(model: str | None, given: Given, preset: str | None) -> DecodeConfig:
    """Settings that suit the model, checked before its weights are read."""
    from lopa.models.checkpoint import model_config
    from lopa.models.families import settings_for

    return settings_for(model_config(model or default_model()), preset, given)


def default_of(name: str) -> str:
    """A field's default as the help shows it: one value, or the values by decoder."""
    field = next(f for f in fields(DecodeConfig) if f.name == name)
    if field.default is not None:
        return "" if field.default == () else str(field.default)
    if type(None) in get_args(_hints()[name]):
        return ""  # there is none: the option is off
    decoders: dict[Any, list[str]] = {}  # default → who has it
    for decoder, settings in _settings().items():
        if name in settings:
            decoders.setdefault(settings[name], []).append(decoder)
    return "; ".join(f"{', '.join(names)} {value}" for value, names in decoders.items())


def _parameter(name: str) -> inspect.Parameter:
    panel, line = FIELDS[name]
    default = default_of(name)
    hint = _hints()[name]
    parser = None
    if get_origin(hint) in (Union, UnionType):
        kinds = [kind for kind in get_args(hint) if kind is not type(None)]
        hint = list[str] if Sequence[str] in kinds else kinds[0]  # a list: it may be repeated
        words = [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
        if words:  # a number, or one of these
            hint, parser = str, functools.partial(_number_or_word, words)
    flag = "--" + name.replace("_", "-")
    option = typer.Option(
        f"{flag}/--no-{flag[2:]}" if hint is bool else flag,
        help=f"{line} (default: {default})." if default else f"{line}.",
        show_default=False,
        metavar="INTEGER|" + "|".join(words) if parser else "TEXT" if hint == list[str] else None,
        parser=parser,
        rich_help_panel=panel,
    )
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[hint | None, option],
    )


def _number_or_word(words: Sequence[str], text: str) -> int | str:
    if text in words:
        return text
    try:
        return int(text)
    except ValueError:
        known = " or ".join(words)
        raise typer.BadParameter(f"{text!r} is not a whole number or {known}") from None


@functools.cache
def _hints() -> dict[str, Any]:
    return get_type_hints(DecodeConfig)


@functools.cache
def _settings() -> dict[str, dict[str, Any]]:
    """What each decoder does when nothing else is given."""
    found = {name: DecodeConfig(decoder=name).settings() for name in get_args(DecoderName)}
    found["lopa"]["objective"] = DecodeConfig(branches="auto").objective
    return found
