"""Schemas as automata: whatever they write is valid, and valid values can be written."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import jsonschema
import pytest
from made_up_schemas import made_up, text_of
from walks import walk

from lopa.errors import ConfigError
from lopa.grammar.json_schema import compile_schema


def validator(schema: Any) -> jsonschema.Draft202012Validator:
    kind = jsonschema.Draft202012Validator
    return kind(schema, format_checker=kind.FORMAT_CHECKER)


def validate(text: str, schema: Any) -> None:
    validator(schema).validate(json.loads(text))


def compiled(schema: Any) -> Any:
    return compile_schema(json.dumps(schema))


SLOW = pytest.mark.schemas  # most of them are left to the slow suite
SEEDS = [range(40), *(pytest.param(range(n, n + 52), marks=SLOW) for n in range(40, 300, 52))]


@pytest.mark.parametrize("seeds", SEEDS)
def test_whatever_is_written_is_valid_and_what_is_valid_can_be_written(seeds: range) -> None:
    for seed in seeds:
        made = made_up(seed)
        dfa = compiled(made.schema)
        rng = Random(seed)
        fits = validator(made.schema)
        for _ in range(5):
            fits.validate(json.loads(walk(dfa, rng)))
            value = made.value(rng)
            fits.validate(value)
            assert dfa.accepts(text_of(value)), (made.schema, value)


@pytest.mark.parametrize(
    ("schema", "values", "others"),
    [
        ({"type": "integer", "minimum": -3, "maximum": 12}, range(-3, 13), [-4, 13, 120]),
        ({"type": "integer", "multipleOf": 7, "maximum": 50}, [-7, 0, 49], [1, 56]),
        ({"type": "integer"}, [0, -5, 10**15 - 1], [1.5, 10**15]),
        ({"type": "number", "minimum": 0.1, "maximum": 2}, [0.1, 0.11, 1, 2, 2.0], [0.09, 2.1]),
        ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, [0.5], [0, 1, 0.0]),
        ({"type": "number", "minimum": -1.5, "maximum": -0.5}, [-1.5, -1, -0.5], [0, -2, -0.4]),
        ({"minLength": 2, "maxLength": 2}, ["ab", "🙂🙂", "\n\""], ["a", "abc"]),
        ({"type": ["integer", "null"]}, [1, None], ["a"]),
        ({"type": "array", "maxItems": 2}, [[], [1, [2]]], [[1, 2, 3]]),
        ({"type": "object", "required": ["a"]}, [{"a": 1}, {"a": 1, "b": {}}], [{}, {"b": 1}]),
        ({"type": "object", "minProperties": 1}, [{"a": 1}], [{}]),
        ({"enum": [1, "a"], "type": "string"}, ["a"], [1]),
        ({"enum": ["a", "bc"], "minLength": 2}, ["bc"], ["a"]),
        ({"enum": [1, 5, 9], "minimum": 4, "exclusiveMaximum": 9}, [5], [1, 9]),
        (
            {
                "type": "object",
                "properties": {"a": {"const": 1}},
                "additionalProperties": {"const": 2},
            },
            [{}, {"a": 1}, {"a": 1, "b": 2}, {"b": 2}, {"aa": 2}],
            [{"a": 2}, {"b": 1}],
        ),
        (
            {
                "type": "number",
                "oneOf": [{"type": "integer", "maximum": 3}, {"exclusiveMinimum": 3}],
            },
            [3, 3.5, 4],
            [2.5],
        ),
        (
            {"allOf": [{"type": "number", "minimum": 2}, {"type": "integer"}], "maximum": 4},
            [2, 3, 4],
            [1, 5, 2.5],
        ),
        (
            {"type": "object", "properties": {"a": {"type": "string"}}, "anyOf": [
                {"required": ["a"]}, {"properties": {"b": {"const": 1}}, "required": ["b"]}]},
            [{"a": ""}, {"b": 1}, {"a": "", "b": 1}],
            [{}],
        ),
        (True, [None, [1], {"a": [{"b": 1}]}], []),
    ],
)  # fmt: skip
def test_values(schema: Any, values: Any, others: Any) -> None:
    dfa = compiled(schema)
    for value in values:
        assert dfa.accepts(text_of(value)), value
    for value in others:
        assert not dfa.accepts(text_of(value)), value
    for seed in range(50):
        validate(walk(dfa, Random(seed)), schema)


def test_commas_stand_between_whichever_properties_are_there() -> None:
    names = ("a", "b", "c")
    schema = {"type": "object", "properties": {name: {"const": 0} for name in names}}
    dfa = compiled(schema)
    for bits in range(8):
        kept = {name: 0 for i, name in enumerate(names) if bits >> i & 1}
        assert dfa.accepts(text_of(kept))
    assert not dfa.accepts('{"a": 0,}')
    assert not dfa.accepts('{, "b": 0}')
    assert not dfa.accepts('{"b": 0, "a": 0}')


def test_recursion_goes_to_a_depth() -> None:
    node = {
        "type": "object",
        "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
        "required": ["next"],
        "additionalProperties": False,
    }
    dfa = compiled({"$defs": {"node": node}, "$ref": "#/$defs/node"})
    value: Any = None
    for depth in range(1, 6):
        value = {"next": value}
        assert dfa.accepts(text_of(value)) == (depth <= 3)


def test_a_json_object_may_be_any() -> None:
    dfa = compiled({"type": "object"})
    for seed in range(100):
        assert isinstance(json.loads(walk(dfa, Random(seed))), dict)
    assert dfa.accepts('{"a": [1, {"b": null}], "é": -0.5}')
    assert not dfa.accepts("[]")


@pytest.mark.parametrize("name", ["date", "time", "date-time", "duration", "uuid", "email"])
def test_formats(name: str) -> None:
    schema = {"type": "string", "format": name}
    dfa = compiled(schema)
    for seed in range(200):
        validate(walk(dfa, Random(seed)), schema)


@pytest.mark.parametrize(
    ("schema", "place", "why"),
    [
        ({"properties": {"a": {"not": {}}}}, "/properties/a/not", "keyword not is not known"),
        ({"items": {"uniqueItems": True}}, "/items/uniqueItems", "differ"),
        ({"items": {"$ref": "other.json"}}, "/items/$ref", "must be #"),
        ({"$ref": "#/$defs/gone"}, "/$ref", "there is no"),
        ({"patternProperties": {}}, "/patternProperties", "not known"),
        ({"type": "string", "format": "color"}, "/format", "color"),
        ({"type": "string", "pattern": "(?=a)"}, "/", "look-ahead"),
        ({"type": "strin"}, "/type", "one or more of"),
        ({"minLength": -1}, "/minLength", "at least 0"),
        ({"multipleOf": 0.1}, "/multipleOf", "whole number"),
        ({"oneOf": [{"type": "object"}, {"type": "object"}]}, "/oneOf", "fits both 0 and 1"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "/oneOf", "fits both"),
        ({"allOf": [{"format": "date"}, {"format": "time"}]}, "/allOf/1", "format"),
        ({"properties": {"a~/b": 3}}, "/properties/a~0~1b", "true or false"),
        ({"minProperties": 2, "properties": {"a": {}}}, "/minProperties", "required"),
        ([], "/", "an object, true or false"),
    ],
)
def test_what_cannot_be_kept_to_is_refused_with_its_place(
    schema: Any, place: str, why: str
) -> None:
    with pytest.raises(ConfigError, match=why) as refusal:
        compiled(schema)
    assert f"at {place}:" in str(refusal.value)


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        (False, "false allows nothing"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "no number fits"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "no string fits"),
        ({"type": "string", "pattern": "^abc$", "maxLength": 2}, "no string fits"),
        ({"type": "array", "minItems": 2, "prefixItems": [{}], "items": False}, "minItems 2"),
        ({"required": ["a"], "additionalProperties": False}, "a is required and not allowed"),
        ({"enum": [1, 2], "type": "string"}, "no value of enum"),
        ({"allOf": [{"type": "string"}, {"type": "null"}]}, "no type is left"),
        ({"properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "followed into itself"),
        ({"$ref": "#"}, "followed into itself"),
        ({"required": ["a"], "properties": {"a": {"enum": [1], "minimum": 2}}}, "at /properties/a"),
    ],
)
def test_a_schema_without_values_is_refused_with_the_reason(schema: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as refusal:
        compiled(schema)
    assert "allows no value" in str(refusal.value)


def hostile() -> dict[str, Any]:
    laughs: dict[str, Any] = {"d0": {"type": "string"}}
    for level in range(1, 40):
        laughs[f"d{level}"] = {"anyOf": [{"$ref": f"#/$defs/d{level - 1}"}] * 2}
    wide = {f"d{i}": {"items": {"anyOf": [{"$ref": f"#/$defs/d{j}"} for j in range(8)]}}
            for i in range(8)}  # fmt: skip
    nested: Any = {}
    for _ in range(400):
        nested = {"items": nested}
    return {
        "laughs": {"$defs": laughs, "$ref": "#/$defs/d39"},
        "wide": {"$defs": wide, "$ref": "#/$defs/d0"},
        "nested": {"items": nested},
        "long": {"type": "string", "minLength": 10**9},
        "many": {"type": "array", "items": {}, "minItems": 10**6},
        "lists": {"items": {"maxItems": 99, "items": {"maxItems": 99, "items": {"maxItems": 99}}}},
        "product": {"allOf": [{"anyOf": [{"minLength": i} for i in range(40)]}] * 4},
        "pattern": {"type": "string", "pattern": "(a|b)*a(a|b){30}$"},
        "patterns": {"allOf": [{"pattern": f"a.{{{i}}}b"} for i in range(2, 12)]},
        "one by one": {
            "properties": {f"k{i}": {"pattern": f"(a|b)*a(a|b){{9}}{i}$"} for i in range(200)}
        },
        "digits": {"type": "number", "minimum": 10**40},
        "big": {"enum": ["x" * 2_000_000]},
    }


@pytest.mark.parametrize("name", hostile())
def test_hostile_schemas_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"too large|too deep|at most|allows no value"):
        compiled(hostile()[name])
