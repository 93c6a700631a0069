"""Schemas made from a seed, each with a maker of values that fit it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

KEYS = ("name", "age", "größe", "città", "名前", "e-mail", "a/b", 'say "hi"', "x\\y", "🙂", "", "~")
WORDS = ("red", "green", "blau", "été", "日本", "a b", 'q"q', "back\\slash", "tab\t", "🙂🙃", "")
# A pattern as JSON Schema means it, found anywhere, and texts that fit it.
PATTERNS = (
    ("^[a-z]{2,4}$", ("ab", "abcd")),
    ("[0-9]+", ("7", "no 42 x", "é1")),
    (r"^\d{3}-\d{4}$", ("555-1234",)),
    ("^(yes|no)$", ("yes", "no")),
    ("^a|b$", ("abc", "xb", "a")),
    ("[äöü]", ("schön", "ü")),
    (r"^\S+ \S+$", ("Ada Lovelace", "x ö")),
    ("^.{1,3}$", ("abc", '"', "日本")),
    ("(?i)^ok$", ("ok", "OK", "oK")),
    (r"^\w+\.txt$", ("file_1.txt",)),
)
FORMATS = (
    ("date", ("2024-02-29", "1999-12-31")),
    ("time", ("23:59:59Z", "00:00:00.5+01:00")),
    ("date-time", ("2024-02-29T12:00:00Z",)),
    ("uuid", ("123e4567-e89b-12d3-a456-426614174000",)),
    ("email", ("ada.l@example.org",)),
    ("ipv4", ("192.168.0.255",)),
)

Value = Callable[[Random], Any]


@dataclass(frozen=True)
class MadeUp:
    schema: Any
    value: Value  # one that fits, and that the canonical form can write


def made_up(seed: int, depth: int = 3) -> MadeUp:
    rng = Random(seed)
    top = _object if rng.random() < 0.6 else _any_kind
    found = top(rng, depth)
    if rng.random() < 0.3:
        schema = {"$defs": {"it": found.schema}, "$ref": "#/$defs/it", "title": "made up"}
        return MadeUp(schema, found.value)
    return found


def text_of(value: Any) -> str:
    """A value as the automata write it."""
    return json.dumps(value, ensure_ascii=False)


def _any_kind(rng: Random, depth: int) -> MadeUp:
    leaves = [_string, _integer, _number, _enum, _const, _plain, _pattern, _format]
    nested = [_object, _object, _array, _tuple, _union, _tagged, _together, _map]
    return rng.choice(leaves if not depth or rng.random() < 0.4 else nested)(rng, depth - 1)


def _plain(rng: Random, depth: int) -> MadeUp:
    kind = rng.choice(["boolean", "null", ["boolean", "null"]])
    values = {"boolean": [True, False], "null": [None]}.get(str(kind), [True, False, None])
    return MadeUp({"type": kind}, lambda r: r.choice(values))


def _string(rng: Random, depth: int) -> MadeUp:
    least = rng.choice([0, 0, 1, 3])
    most = rng.choice([None, least, least + rng.randrange(6)])
    schema: dict[str, Any] = {"type": "string", "description": "some text"}
    if least:
        schema["minLength"] = least
    if most is not None:
        schema["maxLength"] = most

    def value(r: Random) -> str:
        count = r.randint(least, least + 4 if most is None else most)
        return "".join(r.choice('ab é日🙂"\\\n\t/{}') for _ in range(count))

    return MadeUp(schema, value)


def _pattern(rng: Random, depth: int) -> MadeUp:
    pattern, texts = rng.choice(PATTERNS)
    return MadeUp({"type": "string", "pattern": pattern}, lambda r: r.choice(texts))


def _format(rng: Random, depth: int) -> MadeUp:
    name, texts = rng.choice(FORMATS)
    return MadeUp({"type": "string", "format": name}, lambda r: r.choice(texts))


def _integer(rng: Random, depth: int) -> MadeUp:
    low = rng.choice([-(10**9), -105, -7, 0, 1, 13, 999])
    high = low + rng.choice([0, 1, 9, 100, 12345])
    schema: dict[str, Any] = {"type": "integer"}
    schema |= {"minimum": low} if rng.random() < 0.5 else {"exclusiveMinimum": low - 1}
    schema |= {"maximum": high} if rng.random() < 0.5 else {"exclusiveMaximum": high + 1}
    step = rng.choice([1, 1, 3, 10])
    if step == 1 or high - low < step:
        return MadeUp(schema, lambda r: r.randint(low, high))
    schema["multipleOf"] = step
    return MadeUp(schema, lambda r: r.randint(-(-low // step), high // step) * step)


def _number(rng: Random, depth: int) -> MadeUp:
    low = rng.choice([-1000.5, -1, -0.25, 0, 0.1, 3.75, 100])
    high = low + rng.choice([0.5, 1, 20.125, 1e6])
    schema: dict[str, Any] = {"type": "number"}
    schema |= {"exclusiveMinimum" if rng.random() < 0.5 else "minimum": low}
    schema |= {"exclusiveMaximum" if rng.random() < 0.5 else "maximum": high}
    # Steps of a 64th have at most six digits behind the point.
    return MadeUp(schema, lambda r: round(low + (high - low) * r.randint(1, 63) / 64, 6))


def _enum(rng: Random, depth: int) -> MadeUp:
    values = [*rng.sample(WORDS, 3), rng.randint(-9, 99), None, True, [1, "x"], {"k": [0.5]}]
    chosen = rng.sample(values, rng.randint(1, 5))
    return MadeUp({"enum": chosen}, lambda r: r.choice(chosen))


def _const(rng: Random, depth: int) -> MadeUp:
    only = rng.choice([rng.choice(WORDS), 7, -1.5, False, None, {"a": []}])
    return MadeUp({"const": only}, lambda r: only)


def _object(rng: Random, depth: int) -> MadeUp:
    keys = rng.sample(KEYS, rng.randint(0, 5))
    inner = {key: _any_kind(rng, depth) for key in keys}
    required = [key for key in keys if rng.random() < 0.5]
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {key: made.schema for key, made in inner.items()},
        "required": required,
    }
    if rng.random() < 0.5:
        schema["additionalProperties"] = False

    def value(r: Random) -> dict[str, Any]:
        kept = [key for key in keys if key in required or r.random() < 0.5]
        return {key: inner[key].value(r) for key in kept}

    return MadeUp(schema, value)


def _map(rng: Random, depth: int) -> MadeUp:
    inner = _any_kind(rng, depth)
    schema = {"type": "object", "additionalProperties": inner.schema}
    return MadeUp(schema, lambda r: {k: inner.value(r) for k in r.sample(KEYS, r.randint(0, 3))})


def _array(rng: Random, depth: int) -> MadeUp:
    inner = _any_kind(rng, depth)
    least = rng.choice([0, 0, 1, 2])
    most = rng.choice([None, least, least + rng.randrange(3)])
    schema: dict[str, Any] = {"type": "array", "items": inner.schema, "minItems": least}
    if most is not None:
        schema["maxItems"] = most
    top = least + 2 if most is None else most
    return MadeUp(schema, lambda r: [inner.value(r) for _ in range(r.randint(least, top))])


def _tuple(rng: Random, depth: int) -> MadeUp:
    inner = [_any_kind(rng, depth) for _ in range(rng.randint(1, 3))]
    schema: dict[str, Any] = {
        "type": "array",
        "prefixItems": [made.schema for made in inner],
        "minItems": rng.randint(0, len(inner)),
    }
    if rng.random() < 0.5:
        schema["items"] = False
    least = schema["minItems"]

    def value(r: Random) -> list[Any]:
        return [made.value(r) for made in inner[: r.randint(least, len(inner))]]

    return MadeUp(schema, value)


def _union(rng: Random, depth: int) -> MadeUp:
    options = [_any_kind(rng, depth) for _ in range(rng.randint(1, 3))]
    schema = {"anyOf": [made.schema for made in options]}
    return MadeUp(schema, lambda r: r.choice(options).value(r))


def _tagged(rng: Random, depth: int) -> MadeUp:
    """oneOf, told apart by a const."""
    inner = {tag: _any_kind(rng, depth) for tag in rng.sample(WORDS, 2)}
    options = [
        {
            "type": "object",
            "properties": {"kind": {"const": tag}, "it": made.schema},
            "required": ["kind", "it"],
        }
        for tag, made in inner.items()
    ]

    def value(r: Random) -> dict[str, Any]:
        tag = r.choice(list(inner))
        return {"kind": tag, "it": inner[tag].value(r)}

    return MadeUp({"oneOf": options}, value)


def _together(rng: Random, depth: int) -> MadeUp:
    """allOf: of an object, and of bounds."""
    a, b = (_any_kind(rng, depth) for _ in range(2))
    schema = {
        "type": "object",
        "allOf": [
            {"properties": {"a": a.schema, "n": {"type": "number", "minimum": 2}}},
            {"properties": {"b": b.schema, "n": {"type": "integer", "maximum": 5}}},
            {"required": ["n", "b"]},
        ],
    }

    def value(r: Random) -> dict[str, Any]:
        return {"a": a.value(r), "n": r.randint(2, 5), "b": b.value(r)}

    return MadeUp(schema, value)
