"""The playground's description of the model: settings, how they depend on each other, examples.

Defaults, ranges and choices come from `DecodeConfig`, help texts from `option_help`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import fields
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from lopa.config import (
    WAITING_BRANCHES,
    AcceptName,
    DecodeConfig,
    DecoderName,
    ScoreName,
    WindowName,
    options_of,
    with_changes,
)
from lopa.models.files import BUILT_IN
from lopa.models.questions import ABOUT
from lopa.option_checks import limits
from lopa.option_help import FIELDS
from lopa.presets import PRESETS
from lopa.version import VERSION

# (name, task, seed): short questions with long answers.
_EXAMPLES = (
    ("Potatoes", "words", 3),
    ("Frogs", "words", 5),
    ("Change", "words", 6),
    ("Sum below", "functions", 7),
    ("Count unique", "functions", 3),
)
_GENERAL = (
    ("Sky", "Question: Why is the sky blue in the day and red in the evening?\nAnswer:"),
    ("Prime", "Write a Python function that says whether a number is prime.\n"),
)
_HINTS = {
    "tiny": f"Solves {ABOUT}.",
}
_SLIDER_BRANCHES = 16  # end of the slider; the field takes more
_RACE_TOKENS = 128  # fewer than the default, since vanilla decodes all of them


def describe(model: str, engine: Mapping[str, Any]) -> dict[str, Any]:
    """`engine` describes itself; its `settings` are those of a request without options."""
    usual = engine.get("settings") or DecodeConfig().settings()
    decoders = [d for d in get_args(DecoderName) if d in engine.get("decoders", [d])]
    return {
        "model": model,
        "version": VERSION,
        "chat": bool(engine.get("chat")),
        "defaults": usual,
        "fields": [_field(name, decoders) for name in _SHOWN],
        "variants": _variants(usual, decoders),
        "presets": _presets() if "lopa" in decoders else {},
        "examples": _examples(model),
        "hint": _HINTS.get(model, ""),
        "contestants": _contestants(decoders),
        "start": {"max_new_tokens": min(_RACE_TOKENS, usual["max_new_tokens"])},
    }


def _field(name: str, decoders: list[str]) -> dict[str, Any]:
    hint = get_type_hints(DecodeConfig)[name]
    if get_origin(hint) in (Union, UnionType):
        parts = [part for part in get_args(hint) if part is not type(None)]
    else:
        parts = [hint]
    group, line = FIELDS[name]
    described: dict[str, Any] = {"name": name, "group": group, "line": line}
    plain = [part for part in parts if get_origin(part) is not Literal]
    words = [word for part in parts if get_origin(part) is Literal for word in get_args(part)]
    if not plain:
        choices = decoders if name == "decoder" else words
        return {**described, "kind": "choice", "choices": choices}
    kind = plain[0]
    if kind is bool:
        return {**described, "kind": "bool"}
    if kind is str:  # one or more
        return {**described, "kind": "texts"}
    low, high = limits(name) or (None, None)
    described |= {"kind": "int" if kind is int else "number", "low": low, "high": high}
    if name == "branches":
        described["slider"] = _SLIDER_BRANCHES
    return {**described, "words": words} if words else described


# The page has a field of its own for a schema, and no place for a regex.
_SHOWN = [name for name in FIELDS if name not in ("schema", "regex")]
# Options that decide which others there are.
_DECIDING = ("decoder", "window", "accept", "score")


def _variants(usual: Mapping[str, Any], decoders: list[str]) -> list[dict[str, Any]]:
    """Names and defaults of the options, for every combination that decides which there are."""
    own: dict[str, Any] = {name: usual.get(name) for name in _DECIDING}
    own["window"] = _window(usual)
    plain = DecodeConfig(**own).settings()  # a score has defaults of its own
    changed = {n: v for n, v in usual.items() if n != "decoder" and v != plain.get(n)}
    changed.setdefault("branches", usual.get("branches", WAITING_BRANCHES))
    # Of lopa, where the server decodes otherwise.
    lopa = DecodeConfig().settings()
    usual_window = own["window"] or lopa["window"]
    usual_accept = usual.get("accept", lopa["accept"])
    found = []
    for decoder in decoders:
        windows = get_args(WindowName) if decoder == "lopa" else (None,)
        accepts = get_args(AcceptName) if decoder == "lopa" else (None,)
        for window in _first(windows, usual_window):
            for accept in _first(accepts, usual_accept):
                # Another way to accept has its own defaults, as the engine process sees it.
                other = accept not in (None, usual_accept)
                kept = with_changes(changed, {"accept": accept}) if other else changed
                for score in _scores(decoder, accept, {} if other else usual):
                    chosen = dict(zip(_DECIDING, (decoder, window, accept, score), strict=True))
                    found.append(_variant(chosen, kept))
    return found


def _scores(decoder: Any, accept: Any, usual: Mapping[str, Any]) -> list[Any]:
    """None alone where no branch is scored."""
    own = DecodeConfig(decoder=decoder, accept=accept).settings()
    if "score" not in own:
        return [None]
    return _first(get_args(ScoreName), usual.get("score", own["score"]))


def _variant(chosen: dict[str, Any], changed: Mapping[str, Any]) -> dict[str, Any]:
    decoder, window, score = chosen["decoder"], chosen["window"], chosen["score"]
    settings = DecodeConfig(**chosen).settings()
    own = options_of(decoder, window, score)
    if decoder == "lopa":  # which has a value for all that it uses
        own &= settings.keys()
    used = [name for name in _SHOWN if name in _COMMON or name in own]
    if window is None:  # only lopa can choose it
        used.remove("window")
    if "objective" in used:  # for branches auto only; the page leaves it at its default
        used.remove("objective")
    changed = {name: value for name, value in changed.items() if name not in _DECIDING}
    defaults = {name: changed.get(name, settings.get(name)) for name in used}
    return {
        **chosen,
        "used": used,
        "defaults": {name: value for name, value in defaults.items() if value is not None},
    }


# Options that every decoder has.
_COMMON = frozenset(f.name for f in fields(DecodeConfig)) - frozenset(
    name for d in get_args(DecoderName) for w in get_args(WindowName) for name in options_of(d, w)
)


def _window(usual: Mapping[str, Any]) -> Any:
    return usual.get("window") if usual["decoder"] == "lopa" else None


def _first(values: tuple[Any, ...], usual: Any) -> list[Any]:
    """The default first: the page takes the first that fits."""
    return sorted(values, key=lambda value: value != usual)


def _presets() -> dict[str, dict[str, Any]]:
    """What each preset changes, and its branches: the server may have its own number."""
    usual = {**DecodeConfig().settings(), "branches": None}
    return {
        name: {k: v for k, v in DecodeConfig.preset(name).settings().items() if v != usual.get(k)}
        for name in PRESETS
    }


@functools.cache
def _examples(model: str) -> list[dict[str, str]]:
    if model not in BUILT_IN:
        return [{"name": name, "prompt": prompt} for name, prompt in _GENERAL]
    from lopa.tasks import generate

    return [
        {"name": name, "prompt": generate(task, seed, "eval").prompt}
        for name, task, seed in _EXAMPLES
    ]


def _contestants(decoders: list[str]) -> list[dict[str, Any]]:
    """The settings that the race view starts with."""
    hints = get_args(get_type_hints(DecodeConfig)["branches"])
    auto = any(get_origin(hint) is Literal and "auto" in get_args(hint) for hint in hints)
    wanted: list[dict[str, Any]] = [
        {"decoder": "vanilla"},
        {"decoder": "d2f"},
        {"decoder": "lopa", "branches": 7},
        {"decoder": "lopa", "branches": "auto" if auto else 15},
    ]
    fitting = [settings for settings in wanted if settings["decoder"] in decoders]
    return fitting or [{"decoder": decoder} for decoder in decoders]
