"""Schemas without combinators: $ref, allOf, anyOf and oneOf as lists of plain alternatives.

A plain schema has only keywords that are kept to as they stand. Schemas that hold together are
merged into one; what cannot be merged, and what is not known, is refused with its place.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lopa.errors import ConfigError
from lopa.grammar.automaton import too_large

RECURSION = 3  # times that a reference is followed into itself
_MAX_VISITS = 20_000  # schemas looked at
_MAX_ALTERNATIVES = 1_000

TYPES = ("object", "array", "string", "integer", "number", "boolean", "null")
OBJECT = {"properties", "required", "additionalProperties", "minProperties", "maxProperties"}
ARRAY = {"items", "prefixItems", "minItems", "maxItems", "uniqueItems"}
STRING = {"minLength", "maxLength", "pattern", "format"}
NUMBER = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
_ITEMS = {"items", "prefixItems"}
_COMBINING = {"$ref", "allOf", "anyOf", "oneOf"}
_PLAIN = {"type", "enum", "const", *OBJECT, *ARRAY, *STRING, *NUMBER}
_ANNOTATIONS = {
    *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
    *("$schema", "$id", "$comment", "$defs", "definitions", "$anchor", "$vocabulary"),
    *("contentEncoding", "contentMediaType", "contentSchema", "discriminator"),
}
_COUNTS = {k for k in _PLAIN if k.startswith(("min", "max")) and k not in ("minimum", "maximum")}
_LARGEST = {"minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"}
_SMALLEST = {"maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"}

Plain = dict[str, Any]  # "pattern" is a list here, and "const" an "enum"


@dataclass(frozen=True)
class Part:
    """A plain schema, where it stands, and the references that were followed to it."""

    schema: Plain
    pointer: str
    trail: tuple[str, ...]

    def child(self, *keys: str | int) -> str:
        return child(self.pointer, *keys)


def child(pointer: str, *keys: str | int) -> str:
    escaped = (str(key).replace("~", "~0").replace("/", "~1") for key in keys)
    return "/".join([pointer, *escaped])


def refused(pointer: str, why: str) -> ConfigError:
    return ConfigError(f"the schema cannot be kept to at {pointer or '/'}: {why}")


class Resolver:
    def __init__(self, root: Any) -> None:
        self.root = root
        self.reasons: list[str] = []  # why a part of it has no value
        self._visits = 0

    def impossible(self, pointer: str, why: str) -> None:
        self.reasons.append(f"{why} (at {pointer or '/'})")

    def parts(self, schema: Any, pointer: str, trail: tuple[str, ...]) -> list[Part]:
        """A value fits the schema if it fits one of these."""
        self._visits += 1
        if self._visits > _MAX_VISITS:
            raise too_large("its references and alternatives are too many")
        if isinstance(schema, bool):
            if not schema:
                self.impossible(pointer, "false allows nothing")
            return [Part({}, pointer, trail)] if schema else []
        if not isinstance(schema, dict):
            raise refused(pointer, "a schema is an object, true or false")
        parts = [Part(self._plain(schema, pointer), pointer, trail)]
        if "$ref" in schema:
            parts = self._all(parts, self._referred(schema["$ref"], pointer, trail), len(trail))
        for index, inner in enumerate(_listed(schema, "allOf", pointer)):
            held = self.parts(inner, child(pointer, "allOf", index), trail)
            parts = self._all(parts, held, len(trail))
        for key in ("anyOf", "oneOf"):
            if key not in schema:
                continue
            options = [
                self.parts(inner, child(pointer, key, index), trail)
                for index, inner in enumerate(_listed(schema, key, pointer))
            ]
            if key == "oneOf":
                self._check_exclusive(options, child(pointer, key), parts)
            parts = self._all(parts, [part for option in options for part in option], len(trail))
        return parts

    def _plain(self, schema: Mapping[str, Any], pointer: str) -> Plain:
        plain: Plain = {}
        for key, value in schema.items():
            if key in _ANNOTATIONS or key in _COMBINING or key.startswith("x-"):
                if key == "$id" and pointer:
                    raise refused(child(pointer, key), "$id is known only at the top: remove it")
            elif key in _PLAIN:
                _check(key, value, child(pointer, key))
                if key == "const":
                    plain = merged(Part(plain, pointer, ()), Part({"enum": [value]}, pointer, ()))
                elif key == "enum" and "enum" in plain:
                    plain["enum"] = [v for v in plain["enum"] if _among(v, value)]
                elif key == "type":
                    plain[key] = [value] if isinstance(value, str) else list(value)
                else:
                    plain[key] = [value] if key == "pattern" else value
            else:
                raise refused(
                    child(pointer, key), f"the keyword {key} is not known here: remove it"
                )
        old = "prefixItems" in plain and "2020-12" not in self._dialect()
        if old:
            raise refused(child(pointer, "prefixItems"), "its $schema does not know prefixItems")
        return plain

    def _dialect(self) -> str:
        return str(self.root.get("$schema", "2020-12"))

    def _referred(self, ref: Any, pointer: str, trail: tuple[str, ...]) -> list[Part]:
        if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
            raise refused(child(pointer, "$ref"), "a reference must be # or begin with #/")
        if trail.count(ref) >= RECURSION:
            self.impossible(pointer, f"{ref} is followed into itself {RECURSION} times at most")
            return []
        found = self.root
        for key in ref.split("/")[1:]:
            key = key.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and key in found:
                found = found[key]
            elif isinstance(found, list) and key.isdecimal() and int(key) < len(found):
                found = found[int(key)]
            else:
                raise refused(child(pointer, "$ref"), f"there is no {ref}")
        return self.parts(found, ref[1:], (*trail, ref))

    def _all(self, left: list[Part], right: list[Part], common: int) -> list[Part]:
        """What fits one of each. The first `common` references are the same in all of them."""
        if len(left) * len(right) > _MAX_ALTERNATIVES:
            raise too_large(f"more than {_MAX_ALTERNATIVES} alternatives")
        found = []
        for a in left:
            for b in right:
                schema = merged(a, b)
                trail = (*a.trail, *b.trail[common:])
                found.append(Part(schema, b.pointer if b.schema else a.pointer, trail))
        return found

    def _check_exclusive(self, options: list[list[Part]], pointer: str, beside: list[Part]) -> None:
        """Refuse options that a value may fit two of: it would not be valid."""
        held = [self._all(beside, option, 0) for option in options]
        for index, left in enumerate(held):
            for other, right in enumerate(held[:index]):
                if not all(self._exclusive(a, b, 0) for a in left for b in right):
                    raise refused(
                        pointer,
                        f"nothing shows that no value fits both {other} and {index}: use anyOf, "
                        "or tell them apart by type or by a required property with a const",
                    )

    def _exclusive(self, a: Part, b: Part, depth: int) -> bool:
        self._visits += 1
        if self._visits > _MAX_VISITS:
            raise too_large("its alternatives are too many")
        x, y = a.schema, b.schema
        if "enum" in x and "enum" in y:
            return not any(_among(value, y["enum"]) for value in x["enum"])
        kinds = [_kinds(schema) for schema in (x, y)]
        common = kinds[0] & kinds[1]
        if common == {"number"}:
            return _above(x, y) or _above(y, x)
        if common != {"object"}:
            return not common
        for one, other in ((x, y), (y, x)):
            for key in one.get("required", ()):
                known = other.get("properties", {})
                if key not in known and other.get("additionalProperties") is False:
                    return True
        shared = {*x.get("required", ())} & {*y.get("required", ())}
        for key in sorted(shared) if depth < RECURSION else ():
            pair = []
            for part in (a, b):
                schema = part.schema.get("properties", {}).get(key, True)
                pair.append(self.parts(schema, part.child("properties", key), part.trail))
            if all(self._exclusive(m, n, depth + 1) for m in pair[0] for n in pair[1]):
                return True
        return False


def _kinds(schema: Plain) -> set[str]:
    """Types that a value of it may have; whole numbers are numbers."""
    found = {*schema.get("type", TYPES)}
    if "enum" in schema:
        found = {kind for value in schema["enum"] for kind in found if is_type(value, kind)}
    return {"number" if kind == "integer" else kind for kind in found}


def _above(x: Plain, y: Plain) -> bool:
    """Whether all numbers of `x` are above those of `y`."""
    lows = [(x[key], key != "minimum") for key in ("minimum", "exclusiveMinimum") if key in x]
    highs = [(y[key], key != "maximum") for key in ("maximum", "exclusiveMaximum") if key in y]
    return any(
        low > high or (low == high and (outside or beyond))
        for low, outside in lows
        for high, beyond in highs
    )


def is_type(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "integer":
        return isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if kind == "number":
        return isinstance(value, int | float)
    kinds: dict[str, type] = {"object": dict, "array": list, "string": str, "null": type(None)}
    return kind in kinds and isinstance(value, kinds[kind])


def _among(value: Any, values: list[Any]) -> bool:
    return any(_key(value) == _key(other) for other in values)


def _key(value: Any) -> Any:
    """Equal for values that JSON Schema takes for the same: 1 is 1.0, but not true."""
    if isinstance(value, dict):
        return {key: _key(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_key(inner) for inner in value]
    return isinstance(value, bool), value


def merged(a: Part, b: Part) -> Plain:
    """The plain schema of what fits both."""
    x, y = a.schema, b.schema
    if not x or not y:
        return dict(x or y)
    found: Plain = {**y, **x}
    for key in x.keys() & y.keys():
        one, other = x[key], y[key]
        if key in _LARGEST:
            found[key] = max(one, other)
        elif key in _SMALLEST:
            found[key] = min(one, other)
        elif key == "type":
            found[key] = _common_types(one, other)
        elif key == "enum":
            found[key] = [value for value in one if _among(value, other)]
        elif key == "pattern":
            found[key] = [*one, *(pattern for pattern in other if pattern not in one)]
        elif key == "required":
            found[key] = list(dict.fromkeys([*one, *other]))
        elif key == "multipleOf" and isinstance(one, int) and isinstance(other, int):
            found[key] = math.lcm(one, other)
        elif key == "uniqueItems":
            found[key] = one or other
        elif key == "items":
            found[key] = _both([one, other])
        elif key in ("properties", "additionalProperties"):
            pass  # below
        elif one != other:
            raise refused(b.pointer, f"two values of {key} that must both hold: give one")
    lists = [schema.get("prefixItems") for schema in (x, y) if schema.keys() & _ITEMS]
    if len(lists) == 2 and lists[0] != lists[1]:
        raise refused(b.pointer, "prefixItems beside other items that must hold: give one")
    if x.keys() & OBJECT and y.keys() & OBJECT:
        _merge_properties(x, y, found)
    return found


def _merge_properties(x: Plain, y: Plain, found: Plain) -> None:
    rest = [schema.get("additionalProperties") for schema in (x, y)]
    named: Plain = {}
    for key in [*x.get("properties", {}), *y.get("properties", {})]:
        each = [
            schema.get("properties", {}).get(key, True if other is None else other)
            for schema, other in zip((x, y), rest, strict=True)
        ]
        named[key] = _both(each)
    if named:
        found["properties"] = named
    stated = [schema for schema in rest if schema is not None]
    if stated:
        found["additionalProperties"] = _both(stated)


def _both(schemas: list[Any]) -> Any:
    stated = [schema for schema in schemas if schema is not True]
    if False in stated:
        return False
    if len(stated) < 2 or stated[0] == stated[1]:
        return stated[0] if stated else True
    return {"allOf": stated}


def _common_types(one: list[str], other: list[str]) -> list[str]:
    found = [kind for kind in one if kind in other]
    whole = any("integer" in a and "number" in b for a, b in ((one, other), (other, one)))
    return [*found, "integer"] if whole and not {"integer", "number"} & {*found} else found


def _listed(schema: Mapping[str, Any], key: str, pointer: str) -> Iterator[Any]:
    options = schema.get(key, [])
    if not isinstance(options, list) or (key in schema and not options):
        raise refused(child(pointer, key), f"{key} must be a list of schemas")
    yield from options


def _check(key: str, value: Any, pointer: str) -> None:
    """That the keyword has a value of its kind."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    strings = isinstance(value, list) and all(isinstance(v, str) for v in value)
    good = True
    if key == "type":
        kinds = [value] if isinstance(value, str) else value
        good = isinstance(kinds, list) and bool(kinds) and all(k in TYPES for k in kinds)
        wanted = f"one or more of {', '.join(TYPES)}"
    elif key in _COUNTS:
        good, wanted = whole and value >= 0, "a whole number, at least 0"
    elif key == "multipleOf":
        real = isinstance(value, int | float) and not isinstance(value, bool)
        good = real and math.isfinite(value) and value > 0 and value == int(value)
        wanted = "a whole number above 0 (others cannot be kept to)"
    elif key in NUMBER:
        real = isinstance(value, int | float) and not isinstance(value, bool)
        good, wanted = real and math.isfinite(value), "a number"
    elif key in ("pattern", "format"):
        good, wanted = isinstance(value, str), "a string"
    elif key == "required":
        good, wanted = strings, "a list of strings"
    elif key == "properties":
        good, wanted = isinstance(value, dict), "an object of schemas"
    elif key in ("enum", "prefixItems"):
        good, wanted = isinstance(value, list) and bool(value), "a list, not empty"
    elif key == "uniqueItems":
        good, wanted = isinstance(value, bool), "true or false"
    elif key in ("items", "additionalProperties"):
        good, wanted = isinstance(value, dict | bool), "a schema"
    else:
        wanted = ""
    if not good:
        raise refused(pointer, f"{key} must be {wanted}")


def text_of(value: Any) -> str:
    """How a value is written: as `json.dumps` does, other scripts as they are."""
    return json.dumps(value, ensure_ascii=False)
