"""JSON Schema as an automaton over characters: every text of it is a value that fits.

Values are written in one way: as Python's `json.dumps` writes them, with ", " and ": " and no
other white space, properties in the order of the schema, other scripts as they are and only the
short escapes. Not every valid value is among them: docs/structured.md says what is left out. What
cannot be kept to is refused with its place in the schema.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from fractions import Fraction
from functools import cache, lru_cache
from typing import Any

from lopa.errors import ConfigError
from lopa.grammar import charset, numerals, regex
from lopa.grammar.automaton import Dfa, Nfa, begin_work, both, determinize, only, without
from lopa.grammar.formats import FORMATS
from lopa.grammar.schema_parts import (
    ARRAY,
    NUMBER,
    OBJECT,
    STRING,
    TYPES,
    Part,
    Plain,
    Resolver,
    is_type,
    refused,
    text_of,
)
from lopa.option_checks import MAX_SCHEMA

DEPTH = 3  # of lists and objects inside a value that may be anything
MAX_MULTIPLE = 1_000  # of multipleOf

_ESCAPES = {'"': '"', "\\": "\\", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}
_CONTROL: charset.CharSet = ((0, 0x1F),)
# Of a string: no control character but those with a short escape.
_CONTENT = charset.union([*charset.complement(_CONTROL), *charset.of(_ESCAPES)])
_RAW = charset.intersection(charset.complement(charset.of(_ESCAPES)), _CONTENT)

_QUOTE = charset.of('"')

Build = Callable[[int], int]


def compile_schema(text: str) -> Dfa:
    """ConfigError for what is no schema, cannot be kept to, or has no value."""
    if len(text) > MAX_SCHEMA:
        raise ConfigError(f"schema must have at most {MAX_SCHEMA} characters: got {len(text)}")
    try:
        root = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the schema is not JSON that can be read: {error}") from None
    begin_work()
    try:
        compiler = _Compiler(root)
        start = compiler.nfa.state()
        end = compiler.value(root, "", ())(start)
        found = determinize(compiler.nfa, start, end)
    except RecursionError:
        raise ConfigError("the schema is nested too deep: use fewer levels") from None
    if found.is_empty:
        reasons = compiler.resolver.reasons
        why = f": {reasons[0]}" if reasons else ""
        raise ConfigError(f"the schema allows no value{why}: change it so that one fits")
    return found


class _Compiler:
    """A part is built from a state on. Where there is no value, no way leads to its end."""

    def __init__(self, root: Any) -> None:
        self.nfa = Nfa()
        self.resolver = Resolver(root)

    def value(self, schema: Any, pointer: str, trail: tuple[str, ...]) -> Build:
        def build(source: int) -> int:
            parts = self.resolver.parts(schema, pointer, trail)
            return self.nfa.any_of(source, [self._part(part) for part in parts])

        return build

    def _part(self, part: Part) -> Build:
        schema = part.schema
        if "enum" in schema:
            return self._enum(part)
        kinds = {"object": OBJECT, "array": ARRAY, "string": STRING, "number": NUMBER}
        # A schema without a type is taken to mean the types that it says something about.
        spoken_of = [kind for kind, keys in kinds.items() if schema.keys() & keys]
        types = schema.get("type") or spoken_of
        if not schema:
            return lambda source: self._anything(source, DEPTH)
        if not types:
            self.resolver.impossible(part.pointer, "no type is left")
        if "number" in types:
            types = [kind for kind in types if kind != "integer"]
        builders: dict[str, Callable[[Part, int], int]] = {
            "object": self._object,
            "array": self._array,
            "string": self._string,
            "integer": self._number,
            "number": self._number,
        }
        options: list[Build] = []
        for kind in dict.fromkeys(types):
            if kind == "boolean":
                options += [self._literal("true"), self._literal("false")]
            elif kind == "null":
                options.append(self._literal("null"))
            else:
                narrowed = Part({**schema, "type": [kind]}, part.pointer, part.trail)
                options.append(self._bound(builders[kind], narrowed))
        return lambda source: self.nfa.any_of(source, options)

    def _bound(self, builder: Callable[[Part, int], int], part: Part) -> Build:
        return lambda source: builder(part, source)

    def _literal(self, text: str) -> Build:
        return lambda source: self.nfa.text(source, text)

    # -- enum ---------------------------------------------------------------------------------

    def _enum(self, part: Part) -> Build:
        kept = [value for value in part.schema["enum"] if self._fits(value, part)]
        if not kept:
            self.resolver.impossible(part.pointer, "no value of enum or const fits the rest")
        texts = [self._literal(text_of(value)) for value in kept]
        return lambda source: self.nfa.any_of(source, texts)

    def _fits(self, value: Any, part: Part) -> bool:
        schema = part.schema
        if not any(is_type(value, kind) for kind in schema.get("type", TYPES)):
            return False
        beside = OBJECT if isinstance(value, dict) else ARRAY if isinstance(value, list) else set()
        if schema.keys() & beside:
            raise refused(
                part.pointer, "an enum or const of objects or lists beside other keywords"
            )
        if isinstance(value, str) and schema.keys() & STRING:
            return self._content(part).accepts(value)
        if isinstance(value, int | float) and not isinstance(value, bool):
            low, high = schema.get("minimum", value), schema.get("maximum", value)
            above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
            inside = (above is None or value > above) and (below is None or value < below)
            divided = "multipleOf" not in schema or not value % schema["multipleOf"]
            return bool(low <= value <= high and inside and divided)
        return True

    # -- strings ------------------------------------------------------------------------------

    def _string(self, part: Part, source: int) -> int:
        content = self._content(part)
        if content.is_empty:
            self.resolver.impossible(part.pointer, "no string fits its keywords")
        return self._quoted(source, content)

    def _content(self, part: Part) -> Dfa:
        schema = part.schema
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        name = schema.get("format")
        if name is not None and name not in FORMATS:
            known = ", ".join(FORMATS)
            raise refused(part.child("format"), f"the format {name} is not known: use {known}")
        try:
            return _string_content(least, most, tuple(schema.get("pattern", ())), name)
        except ConfigError as error:
            raise refused(part.pointer, str(error)) from None

    def _quoted(self, source: int, content: Dfa) -> int:
        """A string in quotes, with its escapes."""
        nfa = self.nfa
        states = [nfa.state() for _ in range(len(content.next))]
        end = nfa.state()
        nfa.char(source, _QUOTE, states[0])
        for state, inner in enumerate(states):
            for chars, target in content.moves(state):
                raw, letters = _spelt(chars)
                nfa.char(inner, raw, states[target])
                if letters:
                    nfa.char(nfa.text(inner, "\\"), letters, states[target])
            if content.accepting[state]:
                nfa.char(inner, _QUOTE, end)
        return end

    # -- numbers ------------------------------------------------------------------------------

    def _number(self, part: Part, source: int) -> int:
        schema = part.schema
        whole = schema["type"] == ["integer"]
        for key in NUMBER & schema.keys():
            if not numerals.fits(Fraction(schema[key])):
                raise refused(part.child(key), "the number is too large")
        multiple = int(schema.get("multipleOf", 1))
        if multiple > MAX_MULTIPLE:
            raise refused(part.child("multipleOf"), f"it must be at most {MAX_MULTIPLE}")
        bounds = tuple(schema.get(key) for key in _BOUNDS)
        dfa = _number_between(*bounds, whole=whole or "multipleOf" in schema, multiple=multiple)
        if dfa.is_empty:
            self.resolver.impossible(part.pointer, "no number fits its keywords")
        return self.nfa.embed(source, dfa)

    # -- lists --------------------------------------------------------------------------------

    def _array(self, part: Part, source: int) -> int:
        schema = part.schema
        first = schema.get("prefixItems", [])
        # What may follow `prefixItems` is not written unless the schema says what it is.
        rest = schema.get("items", not first)
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if schema.get("uniqueItems") and (most is None or most > 1):
            raise refused(
                part.child("uniqueItems"), "that items differ cannot be kept to: remove it"
            )
        items = [
            self.value(inner, part.child("prefixItems", index), part.trail)
            for index, inner in enumerate(first[:most])
        ]
        if rest is False:
            most = len(items)
        if most is not None and least > most:
            self.resolver.impossible(part.pointer, f"minItems {least}, but at most {most} items")
        other = self.value(rest, part.child("items"), part.trail)
        if rest is True:
            other = self._inner_anything
        return self._list(source, items, other, least, most)

    def _list(
        self, source: int, items: list[Build], other: Build, least: int, most: int | None
    ) -> int:
        nfa = self.nfa
        here, close = nfa.text(source, "["), nfa.state()
        count = 0
        while True:
            if count >= least:
                nfa.skip(here, close)
            if count == most:
                break
            if most is None and count >= max(least, len(items), 1):
                nfa.skip(other(nfa.text(here, ", ")), here)
                break
            item = items[count] if count < len(items) else other
            ended = nfa.state()
            nfa.skip(item(nfa.text(here, ", ") if count else here), ended)
            here, count = ended, count + 1
        return nfa.text(close, "]")

    # -- objects ------------------------------------------------------------------------------

    def _object(self, part: Part, source: int) -> int:
        schema: Plain = part.schema
        named: dict[str, Any] = schema.get("properties", {})
        rest = schema.get("additionalProperties")
        if rest is None and "properties" not in schema:
            rest = True  # nothing is said of any property, so all are written
        required = schema.get("required", [])
        keys = dict.fromkeys([*named, *required])
        if rest is False and keys.keys() - named.keys():
            missing = next(key for key in keys if key not in named)
            self.resolver.impossible(part.pointer, f"{missing} is required and not allowed")
        self._check_count(part, len({*required}), len(keys), rest not in (None, False))
        properties = []
        for key in keys:
            if key in named:
                inner = self.value(named[key], part.child("properties", key), part.trail)
            elif rest in (None, True):
                inner = self._inner_anything
            else:
                inner = self.value(rest, part.child("additionalProperties"), part.trail)
            properties.append((text_of(key), inner, key in required))
        more: Build | None = None
        if rest is True:
            more = self._inner_anything
        elif rest:
            more = self.value(rest, part.child("additionalProperties"), part.trail)
        some = schema.get("minProperties", 0) > len({*required})
        return self._braces(source, properties, more, _keys(tuple(keys)), some)

    def _check_count(self, part: Part, required: int, named: int, more: bool) -> None:
        least = part.schema.get("minProperties", 0)
        most = part.schema.get("maxProperties")
        if least > required and not (more and not named and least == 1):
            raise refused(
                part.child("minProperties"), "only as many as are required can be kept to"
            )
        if most is not None and (more or most < named):
            raise refused(part.child("maxProperties"), "fewer than are named cannot be kept to")

    def _braces(
        self,
        source: int,
        properties: list[tuple[str, Build, bool]],
        more: Build | None,
        other_keys: Dfa,
        some: bool = False,
    ) -> int:
        """`more`: values of further properties, at least one with `some`."""
        nfa = self.nfa
        # Two states before each property: in the one nothing has been written yet.
        fresh, after = nfa.text(source, "{"), nfa.state()
        for key, value, is_required in properties:
            begun, next_fresh, next_after = nfa.state(), nfa.state(), nfa.state()
            nfa.skip(fresh, begun)
            nfa.skip(nfa.text(after, ", "), begun)
            nfa.skip(value(nfa.text(begun, key + ": ")), next_after)
            if not is_required:
                nfa.skip(fresh, next_fresh)
                nfa.skip(after, next_after)
            fresh, after = next_fresh, next_after
        close = nfa.state()
        if more is not None:
            begun = nfa.state()
            nfa.skip(fresh, begun)
            nfa.skip(nfa.text(after, ", "), begun)
            nfa.skip(more(nfa.text(self._quoted(begun, other_keys), ": ")), after)
        if not some:
            nfa.skip(fresh, close)
        nfa.skip(after, close)
        return nfa.text(close, "}")

    # -- anything -----------------------------------------------------------------------------

    def _inner_anything(self, source: int) -> int:
        return self._anything(source, DEPTH - 1)

    def _anything(self, source: int, depth: int) -> int:
        """Any value with lists and objects inside each other to `depth`."""
        options: list[Build] = [self._literal(text) for text in ("null", "true", "false")]
        options.append(lambda source: self._quoted(source, _string_content(0, None, (), None)))
        options.append(lambda source: self.nfa.embed(source, _number_between()))
        if depth:
            inner: Build = lambda source: self._anything(source, depth - 1)  # noqa: E731
            options.append(lambda source: self._list(source, [], inner, 0, None))
            options.append(lambda source: self._braces(source, [], inner, _keys(())))
        return self.nfa.any_of(source, options)


_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


@lru_cache(maxsize=2_000)
def _spelt(chars: charset.CharSet) -> tuple[charset.CharSet, charset.CharSet]:
    """Of these characters those written as they are, and the letters that escape the others."""
    escaped = charset.intersection(chars, charset.of(_ESCAPES))
    letters = charset.of(_ESCAPES[chr(point)] for point in charset.points(escaped))
    return charset.intersection(chars, _RAW), letters


@lru_cache(maxsize=500)
def _string_content(
    least: int, most: int | None, patterns: tuple[str, ...], name: str | None
) -> Dfa:
    nfa = Nfa()
    start = nfa.state()
    character: Build = lambda source: nfa.char(source, _CONTENT)  # noqa: E731
    found = determinize(nfa, start, nfa.repeat(start, character, least, most))
    for pattern in patterns:
        found = both(found, only(regex.search(pattern), _CONTENT))
    return found if name is None else both(found, _format(name))


@cache
def _format(name: str) -> Dfa:
    return regex.matching("(?a)" + FORMATS[name])


@lru_cache(maxsize=500)
def _number_between(
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    below: float | None = None,
    *,
    whole: bool = False,
    multiple: int = 1,
) -> Dfa:
    digits = 0 if whole else numerals.FRACTION_DIGITS
    for bound in (above, below):
        if bound is not None:
            digits = min(digits, numerals.digits_to_tell(numerals.of_number(bound)))
    unit = Fraction(1, 10**digits)
    lows = [] if low is None else [numerals.of_number(low)]
    highs = [] if high is None else [numerals.of_number(high)]
    if above is not None:
        lows.append((numerals.of_number(above) // unit + 1) * unit)
    if below is not None:
        highs.append((-(-numerals.of_number(below) // unit) - 1) * unit)
    nfa = Nfa()
    start = nfa.state()
    bounds = max(lows, default=None), min(highs, default=None)
    found = determinize(nfa, start, numerals.between(nfa, start, *bounds, digits))
    if multiple == 1:
        return found
    nfa = Nfa()
    start = nfa.state()
    return both(found, determinize(nfa, start, numerals.multiples(nfa, start, multiple)))


@lru_cache(maxsize=500)
def _keys(named: tuple[str, ...]) -> Dfa:
    """Names of properties other than these."""
    anything = _string_content(0, None, (), None)
    if not named:
        return anything
    nfa = Nfa()
    start, end = nfa.state(), nfa.state()
    for name in named:
        nfa.skip(nfa.text(start, name), end)
    return without(anything, determinize(nfa, start, end))
