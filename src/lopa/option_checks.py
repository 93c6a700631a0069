"""What each option of `DecodeConfig` may be: ranges, lengths, names.

A check looks at one option and is a ConfigError that says what it may be. What options may be
together is checked by `DecodeConfig`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any, get_args

from lopa.errors import ConfigError
from lopa.option_help import FIELDS

MAX_BRANCHES = 128
MAX_SCHEMA = 100_000  # characters of its JSON text
MAX_REGEX = 10_000

_NO_LIMIT = 2**63 - 1
# Least and greatest value
_WHOLE_NUMBERS: dict[str, tuple[int, int]] = {
    "max_new_tokens": (1, _NO_LIMIT),
    "block_size": (1, _NO_LIMIT),
    "steps": (1, 1_000_000),
    "quota": (1, _NO_LIMIT),
    "edit_rounds": (0, _NO_LIMIT),
    "branches": (0, MAX_BRANCHES),
    "score_window": (1, _NO_LIMIT),
    "max_rounds": (1, _NO_LIMIT),
    "top_k": (0, _NO_LIMIT),
    "seed": (0, _NO_LIMIT),
}
_NUMBERS: dict[str, tuple[float, float]] = {
    "append_at": (0.0, 1.0),
    "activate_at": (0.0, 1.0),
    "threshold": (0.0, 1.0),
    "edit_threshold": (0.0, 1.0),
    "factor": (0.0, 1e6),
    "score_fraction": (0.0, 1.0),
    "agreement": (0.0, 1.0),
    "agreement_ahead": (0.0, 1.0),
    "creation_weight": (0.0, 1.0),
    "lookahead_floor": (0.0, 1.0),
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
}
_RANGES: dict[str, tuple[float, float]] = {**_WHOLE_NUMBERS, **_NUMBERS}
NUMBERS = tuple(_RANGES)
# None is no value of these. It turns others off, or stands for the decoder's default.
_ALWAYS_SET = ("max_new_tokens", "temperature", "top_p", "top_k", "seed")

# Settings that vLLM's SamplingParams call otherwise.
_VLLM_NAMES = {
    "max_tokens": "max_new_tokens",
    "ignore_eos": "early_stop=False",
    "guided_json": "schema",
    "guided_regex": "regex",
    "structured_outputs": "schema or regex",
    "sampling_params": "config, a DecodeConfig",
}


def limits(name: str) -> tuple[float, float | None] | None:
    """The least and the greatest value of a number, None where there is no limit to speak of."""
    if name not in _RANGES:
        return None
    low, high = _RANGES[name]
    return low, high if high < _NO_LIMIT else None


def check_names(settings: Iterable[str]) -> None:
    """For a name that is no setting, with the one that was meant."""
    for name in settings:
        if name not in FIELDS:
            meant = _VLLM_NAMES.get(name) or next(iter(get_close_matches(name, list(FIELDS))), None)
            remedy = f"it is {meant} here" if meant else "help(lopa.DecodeConfig) lists them"
            raise ConfigError(f"there is no setting {name}: {remedy}")


def check_choice(name: str, value: object, kind: Any) -> None:
    """kind: the `Literal` of the names to choose from."""
    if not isinstance(value, str) or value not in get_args(kind):
        raise ConfigError(f"{name} must be one of {', '.join(get_args(kind))}: got {value!r}")


def check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be true or false: got {value!r}")


def plain_number(value: object) -> object:
    """A number of another library (numpy's, say) as Python's own; other values as they are."""
    if isinstance(value, bool | int | float):
        return value
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else value


def check_number(name: str, value: Any) -> None:
    if value is None and name not in _ALWAYS_SET:
        return
    if name in _WHOLE_NUMBERS:
        _check_whole_number(name, value, *_WHOLE_NUMBERS[name])
        return
    low, high = _NUMBERS[name]
    is_real = isinstance(value, int | float) and not isinstance(value, bool)
    # An int may be too large for a float, so the range is looked at first.
    if not is_real or not low <= value <= high:
        raise ConfigError(f"{name} must be between {low} and {high}: got {value!r}")


def _check_whole_number(name: str, value: object, low: int, high: int) -> None:
    if name == "branches" and value == "auto":
        return
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        beyond = isinstance(value, int) and value > high
        upper = f" and at most {high}" if beyond or high < _NO_LIMIT else ""
        word = ", or auto" if name == "branches" else ""
        raise ConfigError(
            f"{name} must be a whole number, at least {low}{upper}{word}: got {value!r}"
        )


def check_texts(stop: Sequence[Any], regex: Any) -> None:
    if not all(isinstance(s, str) and s for s in stop):
        raise ConfigError("stop must be one or more non-empty strings")
    if not isinstance(regex, str | None):
        raise ConfigError(f"regex must be a string: got {type(regex).__name__}")
    if regex is not None and len(regex) > MAX_REGEX:
        raise ConfigError(f"regex must have at most {MAX_REGEX} characters")
    for name, texts in (("stop", stop), ("regex", [regex or ""])):
        if any("\ud800" <= char <= "\udfff" for text in texts for char in text):
            raise ConfigError(f"{name} must be text that UTF-8 can hold")


def schema_text(schema: object) -> str | None:
    """One text for one schema. The order of its keys is kept: properties are written in it."""
    if schema is None:
        return None
    if isinstance(schema, str) and len(schema) > MAX_SCHEMA:
        raise ConfigError(f"schema must have at most {MAX_SCHEMA} characters: got {len(schema)}")
    try:
        value = json.loads(schema) if isinstance(schema, str) else schema
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"schema must be a JSON Schema, or its JSON text: {error}") from None
    if not isinstance(value, Mapping | bool):
        raise ConfigError("schema must be a JSON Schema: an object, true or false")
    if len(text) > MAX_SCHEMA:
        raise ConfigError(f"schema must have at most {MAX_SCHEMA} characters: got {len(text)}")
    return text
