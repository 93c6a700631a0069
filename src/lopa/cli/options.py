"""Options that commands share. A decorator adds a group of them to a command.

`with_model` passes a `ModelOptions`, `with_parallel` a `ParallelOptions`, `with_decoding` a dict of
the fields of `DecodeConfig` that were given. No default is written here: an option left out is None
and is not passed on, so that `DecodeConfig` or `LLM` decides.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

import typer

from lopa.cli.progress import start_torch
from lopa.config import RANK_TIMEOUT, DecodeConfig, DecoderName, with_waiting_branches
from lopa.errors import ConfigError
from lopa.models.files import BUILT_IN
from lopa.option_help import FIELDS
from lopa.presets import PRESETS

DecodeOptions: TypeAlias = Mapping[str, Any]  # the fields of DecodeConfig that were given
Command: TypeAlias = Callable[..., None]

_UNTRAINED = "dummy:dream-tiny"


def default_model() -> str:
    """The built-in model; random weights where it is not installed."""
    return "tiny" if (BUILT_IN["tiny"] / "config.json").exists() else _UNTRAINED


ChatOption = Annotated[
    bool, typer.Option("--chat", help="Apply the model's chat template to the prompt.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
TraceOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write every round to FILE as JSON Lines.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Which model, how it is loaded, and its preset."""

    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            help="Model: tiny, a folder, a hub id, or dummy:NAME for random weights "
            f"(default: {default_model()}).",
            rich_help_panel="Model",
        ),
    ] = None
    adapter: Annotated[
        str | None,
        typer.Option(help="PEFT LoRA to merge: a folder or a hub id.", rich_help_panel="Model"),
    ] = None
    device: Annotated[
        str | None,
        typer.Option(
            help="cpu, cuda, cuda:1, mps, npu (default: the first accelerator, else the CPU).",
            rich_help_panel="Model",
        ),
    ] = None
    dtype: Annotated[
        str | None,
        typer.Option(
            help="float32, bfloat16, float16, float64 (default: the checkpoint's).",
            rich_help_panel="Model",
        ),
    ] = None
    quantize: Annotated[
        str | None,
        typer.Option(
            help="Quantize the linear layers: fp8 or int8 (default: off).", rich_help_panel="Model"
        ),
    ] = None
    round_cost: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="What rounds cost, for branches auto, as `lopa bench cost` wrote it: a run can "
            "be repeated (default: measured once and kept).",
            rich_help_panel="Model",
        ),
    ] = None
    preset: Annotated[
        str | None,
        typer.Option(
            help=f"Settings published with the paper; other options override them: "
            f"{', '.join(PRESETS)}.",
            rich_help_panel="Decoding",
        ),
    ] = None

    @property
    def name(self) -> str:
        return self.model or default_model()

    @property
    def llm_options(self) -> dict[str, Any]:
        """The arguments of `LLM` that were given, beside the model."""
        options: dict[str, Any] = {
            "adapter": self.adapter,
            "device": self.device,
            "dtype": self.dtype,
            "quantize": self.quantize,
        }
        if self.round_cost is not None:
            from lopa.decoding.round_cost import RoundCost  # imports numpy

            options["round_cost"] = RoundCost.read(self.round_cost).settings()
        return {name: value for name, value in options.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelOptions:
    """How many ranks."""

    branch_parallel: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Replicas that share a round's branches (default: 1; under torchrun, all ranks).",
            rich_help_panel="Devices",
        ),
    ] = None
    tensor_parallel: Annotated[
        int | None,
        typer.Option(
            min=1, help="Ranks that share a replica (default: 1).", rich_help_panel="Devices"
        ),
    ] = None
    rank_timeout: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            metavar="SECONDS",
            help=f"Silence after which a rank counts as lost (default: {RANK_TIMEOUT:g}).",
            rich_help_panel="Devices",
        ),
    ] = None

    @property
    def ranks(self) -> int:
        return (self.branch_parallel or 1) * (self.tensor_parallel or 1)


def with_options(
    argument: str, options: Iterable[inspect.Parameter], build: Callable[..., Any] = dict
) -> Callable[[Command], Command]:
    """Add options to a command, which receives `build(**given)` as its argument `argument`."""
    added = list(options)

    def decorate(command: Command) -> Command:
        signature = inspect.signature(command, eval_str=True)
        own = [p for name, p in signature.parameters.items() if name != argument]

        @functools.wraps(command)
        def wrapped(**values: Any) -> None:
            given = {option.name: values.pop(option.name) for option in added}
            # An option that may be repeated is an empty list when it is left out.
            given = {name: value for name, value in given.items() if value not in (None, [])}
            command(**values, **{argument: build(**given)})

        wrapped.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*own, *added]
        )
        return wrapped

    return decorate


def with_model(*without: str) -> Callable[[Command], Command]:
    """Add the options of `ModelOptions` but those named; the argument is `model`."""
    return with_options("model", _options_of(ModelOptions, without), ModelOptions)


def with_parallel(*without: str) -> Callable[[Command], Command]:
    """Add the options of `ParallelOptions` but those named; the argument is `parallel`."""
    return with_options("parallel", _options_of(ParallelOptions, without), ParallelOptions)


def with_decoding(*without: str, **defaults: str) -> Callable[[Command], Command]:
    """Add an option per field of DecodeConfig but those named; the argument is `decoding`.

    defaults: as the help shows them, where they are the command's own.
    """
    names = [name for name in FIELDS if name not in without]
    shown = {name: defaults.get(name) or default_of(name) for name in names}
    return with_options("decoding", [option(n, _hints()[n], *FIELDS[n], shown[n]) for n in names])


def decode_config(model: ModelOptions, decoding: DecodeOptions) -> DecodeConfig:
    """The settings for this model, checked before its weights are loaded."""
    start_torch()
    from lopa.models.checkpoint import model_config
    from lopa.models.families import settings_for

    return settings_for(model_config(model.name), model.preset, decoding)


def waiting_config(model: ModelOptions, decoding: DecodeOptions) -> DecodeConfig:
    """The same for a command whose user waits for the answer: branches auto, unless given."""
    start_torch()
    from lopa.models.checkpoint import model_config
    from lopa.models.families import family_named

    config = model_config(model.name)
    own = family_named(config.family).defaults(config, None)
    usual = own.get("decoder", DecodeConfig().decoder)
    return decode_config(model, with_waiting_branches(decoding, usual, model.preset))


def default_of(name: str) -> str:
    """A field's default as the help shows it: one value, or the values by decoder."""
    field = next(f for f in fields(DecodeConfig) if f.name == name)
    if field.default is not None:
        return "" if field.default == () else str(field.default)
    if type(None) in get_args(_hints()[name]):
        return ""  # the option is off by default
    decoders: dict[Any, list[str]] = {}  # default → decoders that have it
    for decoder, settings in _settings().items():
        if name in settings:
            decoders.setdefault(settings[name], []).append(decoder)
    return "; ".join(f"{', '.join(names)} {value}" for value, names in decoders.items())


def option(name: str, hint: Any, panel: str, line: str, default: str) -> inspect.Parameter:
    """The option for a field of a dataclass."""
    parser: Callable[[str], int | str] | None = None
    if get_origin(hint) in (Union, UnionType):
        kinds = [kind for kind in get_args(hint) if kind is not type(None)]
        hint = Sequence[str] if Sequence[str] in kinds else kinds[0]
        words = [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
        if words:  # a number, or one of these
            hint, parser = str, functools.partial(_number_or_word, words)
    if hint in (Sequence[str], tuple[str, ...]):
        hint = list[str]  # an option that may be repeated
    metavar = "INTEGER|" + "|".join(words) if parser else "TEXT" if hint == list[str] else None
    if name == "schema":
        parser, metavar = _schema_file, "FILE"
    flag = "--" + name.replace("_", "-")
    info = typer.Option(
        f"{flag}/--no-{flag[2:]}" if hint is bool else flag,
        help=f"{line} (default: {default})." if default else f"{line}.",
        show_default=False,
        metavar=metavar,
        parser=parser,
        rich_help_panel=panel,
    )
    return _keyword(name, Annotated[hint | None, info])


def numbers(name: str, text: str, least: int) -> list[int]:
    """Of an option that takes several."""
    try:
        found = [int(word) for word in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < least:
        raise ConfigError(f"{name} must be whole numbers, at least {least}, separated by commas")
    return found


def _options_of(group: type, without: Sequence[str]) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [_keyword(name, hint) for name, hint in hints.items() if name not in without]


def _keyword(name: str, annotation: Any) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=None, annotation=annotation)


def _number_or_word(words: Sequence[str], text: str) -> int | str:
    if text in words:
        return text
    try:
        return int(text)
    except ValueError:
        known = " or ".join(words)
        raise typer.BadParameter(f"{text!r} is not a whole number or {known}") from None


def _schema_file(name: str) -> str:
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"cannot read {name}: {error}; give a file of JSON") from None


@functools.cache
def _hints() -> dict[str, Any]:
    return get_type_hints(DecodeConfig)


@functools.cache
def _settings() -> dict[str, dict[str, Any]]:
    """The default settings of each decoder."""
    found = {name: DecodeConfig(decoder=name).settings() for name in get_args(DecoderName)}
    found["lopa"]["objective"] = DecodeConfig(branches="auto").objective
    return found
