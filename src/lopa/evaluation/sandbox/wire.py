"""Plain values as text, between a process that is trusted and one that is not.

JSON carries None, bool, int, float, str and list as they are. Everything else is an object with one
name, the tag. What the trusted side reads is built by the table below and nothing else, out of
types whose behaviour is Python's own: whatever the other side writes, it is at worst another value.

An object that is not plain stays where it is and goes by a number: see `Exports`.
"""

from __future__ import annotations

import builtins
import datetime
import json
import os
import re
import sys
from collections import deque
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from itertools import chain
from typing import Any

DEPTH = 200  # of lists in lists
SIZE = 64 << 20  # bytes of a message
_WHOLE = 1 << 62  # greater numbers are written to base 16: Python limits decimal digits
_SIMPLE = frozenset((type(None), bool, str, float))
_HEX = re.compile(r"-?0x[0-9a-f]+")
_NUMPY = re.compile(r"bool|u?int(8|16|32|64)|float(16|32|64)|complex(64|128)")
_HEAD = 8  # bytes that say how long a message is

_MALFORMED = (ValueError, TypeError, LookupError, ArithmeticError, RecursionError, ImportError)

Export = Callable[[Any], dict[str, Any]]  # what stands for an object that is not plain
Objects = Callable[[str, Any], Any]  # tag and number → what stands for it here


class WireError(Exception):
    """A message that is none, or a value that cannot be one."""


def dumps(value: Any, export: Export) -> str:
    return json.dumps(_encode(value, export, 0), ensure_ascii=True, separators=(",", ":"))


def loads(text: str | bytes, objects: Objects) -> Any:
    """The value; WireError for any text that is not one."""

    def build(pairs: list[tuple[str, Any]]) -> Any:
        ((tag, body),) = pairs
        return _BUILD[tag](body) if tag in _BUILD else objects(tag, body)

    try:
        return json.loads(text, object_pairs_hook=build)
    except _MALFORMED as error:
        raise WireError(f"{type(error).__name__}: {error}") from None


def no_objects(tag: str, body: Any) -> Any:
    raise WireError(f"no such tag: {tag}")


def refuse(value: Any) -> dict[str, Any]:
    raise WireError(f"an object of type {type(value).__name__} is not plain")


def _encode(value: Any, export: Export, depth: int) -> Any:
    kind = type(value)
    if kind in _SIMPLE:
        return value
    if kind is int:
        return value if -_WHOLE < value < _WHOLE else {"int": hex(value)}
    if depth > DEPTH:
        raise RecursionError("nested too deeply")
    if kind is list:
        return [_encode(v, export, depth + 1) for v in value]
    for base, tag, parts in _PARTS:
        if kind is base:
            return {tag: _encode(parts(value), export, depth + 1)}
    if kind is type and getattr(builtins, name := str(value.__name__), None) is value:
        return {"type": name}
    for base in (str, int, float):  # subclasses of plain types count by the value that they have
        if isinstance(value, base):
            return _encode(_value(base, value), export, depth)
    if isinstance(value, list):
        return [_encode(v, export, depth + 1) for v in list.__iter__(value)]
    for base, tag, parts in _PARTS:
        if base not in _FINAL and isinstance(value, base):
            return {tag: _encode(parts(value), export, depth + 1)}
    return _encode_numpy(value) or export(value)


def _value(base: type, value: Any) -> Any:
    if base is str:
        return str.__str__(value)
    return int.__index__(value) if base is int else float.__float__(value)


def _encode_numpy(value: Any) -> dict[str, Any] | None:
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.generic | numpy.ndarray):
        return None
    name = value.dtype.name
    if not _NUMPY.fullmatch(name):
        return None
    flat = [_encode(v, refuse, 0) for v in value.reshape(-1).tolist()]
    if isinstance(value, numpy.generic):
        return {"scalar": [name, flat[0]]}
    return {"array": [name, list(value.shape), flat]}


def _pairs(value: dict[Any, Any]) -> list[Any]:
    return list(chain.from_iterable(dict.items(value)))


def _plain_dict(parts: list[Any]) -> dict[Any, Any]:
    return dict(zip(parts[::2], parts[1::2], strict=True))


# type, tag, and what it is made of, which is plain again or is encoded in turn
_PARTS: tuple[tuple[type, str, Callable[[Any], Any]], ...] = (
    (tuple, "tuple", lambda v: list(tuple.__iter__(v))),
    (dict, "dict", _pairs),
    (set, "set", lambda v: list(set.__iter__(v))),
    (frozenset, "frozenset", lambda v: list(frozenset.__iter__(v))),
    (bytes, "bytes", lambda v: bytes.decode(v, "latin-1")),
    (bytearray, "bytearray", lambda v: bytearray.decode(v, "latin-1")),
    (complex, "complex", lambda v: [complex.real.__get__(v), complex.imag.__get__(v)]),
    (range, "range", lambda v: [v.start, v.stop, v.step]),
    (deque, "deque", lambda v: [list(deque.__iter__(v)), v.maxlen]),
    (Decimal, "decimal", Decimal.__str__),
    (Fraction, "fraction", lambda v: [v.numerator, v.denominator]),
    (datetime.datetime, "datetime", datetime.datetime.isoformat),
    (datetime.date, "date", datetime.date.isoformat),
    (datetime.time, "time", datetime.time.isoformat),
    (datetime.timedelta, "timedelta", lambda v: [v.days, v.seconds, v.microseconds]),
    (type({}.keys()), "keys", list),
    (type({}.values()), "values", list),
    (type({}.items()), "items", lambda v: list(chain.from_iterable(v))),
)
_FINAL: tuple[type, ...] = (range, type({}.keys()), type({}.values()), type({}.items()))


def _checked(kind: type, build: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def checked(body: Any) -> Any:
        if type(body) is not kind:
            raise TypeError("another type of value is due")
        return build(body)

    return checked


def _build_int(body: str) -> int:
    if not _HEX.fullmatch(body):
        raise ValueError("no number to base 16")
    return int(body, 16)


def _build_type(body: str) -> type:
    found = getattr(builtins, body, None)
    if not isinstance(found, type):
        raise ValueError("no type of Python's own")
    return found


def _build_numpy(body: list[Any]) -> Any:
    name, *shape, items = body
    if not _NUMPY.fullmatch(name):
        raise ValueError("no such type of number")
    import numpy

    if not shape:
        return numpy.dtype(name).type(items)
    return numpy.array(items, dtype=name).reshape(*shape)


_BUILD: dict[str, Callable[[Any], Any]] = {
    "int": _checked(str, _build_int),
    "type": _checked(str, _build_type),
    "tuple": _checked(list, tuple),
    "dict": _checked(list, _plain_dict),
    "set": _checked(list, set),
    "frozenset": _checked(list, frozenset),
    "bytes": _checked(str, lambda v: v.encode("latin-1")),
    "bytearray": _checked(str, lambda v: bytearray(v, "latin-1")),
    "complex": _checked(list, lambda v: complex(float(v[0]), float(v[1]))),
    "range": _checked(list, lambda v: range(*v)),
    "deque": _checked(list, lambda v: deque(v[0], v[1])),
    "decimal": _checked(str, Decimal),
    "fraction": _checked(list, lambda v: Fraction(*v)),
    "datetime": _checked(str, datetime.datetime.fromisoformat),
    "date": _checked(str, datetime.date.fromisoformat),
    "time": _checked(str, datetime.time.fromisoformat),
    "timedelta": _checked(list, lambda v: datetime.timedelta(v[0], v[1], v[2])),
    "keys": _checked(list, lambda v: dict.fromkeys(v).keys()),
    "values": _checked(list, lambda v: dict(enumerate(v)).values()),
    "items": _checked(list, lambda v: _plain_dict(v).items()),
    "scalar": _checked(list, _build_numpy),
    "array": _checked(list, _build_numpy),
}


class Exports:
    """Objects of this side that the other side knows by number; they live as long as this."""

    def __init__(self, tag: str) -> None:
        self.tag = tag
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}

    def __call__(self, value: Any) -> dict[str, Any]:
        number = self._numbers.setdefault(id(value), len(self._objects))
        if number == len(self._objects):
            self._objects.append(value)
        return {self.tag: number}

    def __getitem__(self, number: Any) -> Any:
        if type(number) is not int or not 0 <= number < len(self._objects):
            raise WireError("no such object")
        return self._objects[number]


def send(socket: int, text: str) -> None:
    data = text.encode()
    if len(data) > SIZE:
        raise WireError("too large a message")
    left = memoryview(len(data).to_bytes(_HEAD, "big") + data)
    while left:
        left = left[os.write(socket, left) :]


def receive(socket: int) -> bytes | None:
    """A whole message; None when the other side has closed. WireError if it is too large."""
    head = _read(socket, _HEAD)
    if head is None:
        return None
    length = int.from_bytes(head, "big")
    if length > SIZE:
        raise WireError("too large a message")
    return _read(socket, length)


def _read(socket: int, length: int) -> bytes | None:
    parts = []
    while length:
        try:
            part = os.read(socket, min(length, 1 << 20))
        except ConnectionResetError:  # closed with something unread
            return None
        if not part:
            return None
        parts.append(part)
        length -= len(part)
    return b"".join(parts)
