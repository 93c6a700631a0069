"""Calls from the tests into the answer's process.

What is called there comes back as a plain value, and every comparison is made here, between values
whose behaviour is Python's own. What is not plain comes back as a `Remote`: it can be called, read,
iterated and given back to the answer's functions, but it equals nothing.
"""

from __future__ import annotations

import builtins
import json
import os
import select
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, NoReturn

from lopa.evaluation.sandbox.wire import Exports, WireError, dumps, loads, receive, send

# How a process ends: by its limit, by the system, by itself.
TIMEOUT, KILLED, EARLY = "timeout", "killed", "ended early"
STATUS, ENDING = b"?", b"!"  # questions to a warden: after the second its process is dead
_ITEMS = 1_000_000  # of an iterator that the tests pass
_MUTABLE = (list, dict, set, bytearray, deque)


def patience(seconds: float) -> float:
    """Seconds of wall clock in which so many of CPU are used, however busy the machine is.

    Only what sleeps takes longer.
    """
    return max(30.0, 10 * seconds)


def ask_warden(control: int, question: bytes) -> dict[str, Any] | None:
    """CPU seconds of its process, and how it ended; None if the warden is gone."""
    try:
        os.write(control, question)
        message = receive(control)
    except OSError:
        return None
    return None if message is None else json.loads(message)


class LostError(BaseException):
    """The answer's process is gone, or does not speak the protocol."""


class UnfitError(BaseException):
    """The tests cannot be judged: it is not the answer's fault."""


class Remote:
    """An object of the answer's own."""

    __slots__ = ("_link", "_number")

    def __init__(self, link: Link, number: int) -> None:
        self._link, self._number = link, number

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self._link.call(self, arguments, options)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._link.ask("attribute", self, name)

    def __getitem__(self, key: Any) -> Any:
        return self._link.ask("item", self, key)

    def __iter__(self) -> Any:
        return self._link.ask("iter", self)

    def __next__(self) -> Any:
        return self._link.ask("next", self)

    def __len__(self) -> int:
        length = self._link.ask("len", self)
        if type(length) is not int or not 0 <= length <= sys.maxsize:
            raise TypeError("a length is a whole number")
        return length

    def _incomparable(self, *_: Any) -> NoReturn:
        raise TypeError("the answer gave an object of its own where a plain value is due")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _incomparable
    __bool__ = __hash__ = _incomparable


class Link:
    """Calls into the answer's process.

    `lost` says why there are no more, `unfit` why the tests cannot be judged: tests that catch
    every exception cannot hide either.
    """

    def __init__(self, link: int, control: int) -> None:
        self._link, self._control = link, control
        self.seconds: float | None = None  # of CPU that a call may take, where there is a limit
        self.changes_arguments = True
        self.lost = self.unfit = ""
        self._objects = Exports("function")

    def run(self, code: str) -> None:
        self.ask("run", code)

    def name(self, name: str) -> Any:
        """What the answer defines; KeyError if nothing."""
        reply = self._exchange(["name", name])
        if reply == ["undefined"]:
            raise KeyError(name)
        return self._result(reply)[0]

    def ask(self, *message: Any) -> Any:
        return self._result(self._exchange(list(message)))[0]

    def call(self, function: Remote, arguments: Sequence[Any], options: dict[str, Any]) -> Any:
        given = self._dumps([list(arguments), options])
        fixed = not self.changes_arguments
        plain = fixed or not any(map(_may_change, (*arguments, *options.values())))
        value, after = self._result(self._exchange(["call", function, given, plain]))
        if after is not None and not plain:
            self._take_over(arguments, options, after)
        return value

    def _take_over(self, arguments: Sequence[Any], options: dict[str, Any], after: Any) -> None:
        """Arguments that the call has changed in place."""
        try:
            values, named = loads(after, self._stand_in)
            pairs = [*zip(arguments, values, strict=True)]
            pairs += [(value, named[name]) for name, value in options.items()]
        except (WireError, ValueError, TypeError, LookupError):
            self._lose("no protocol")
        for old, new in pairs:
            _restore(old, new)

    def _exchange(self, message: list[Any]) -> list[Any]:
        if self.lost:
            raise LostError(self.lost)
        text = self._dumps(message)
        try:
            send(self._link, text)
            while True:
                self._wait()
                reply = receive(self._link)
                if reply is None:
                    break
                found = loads(reply, self._stand_in)
                if type(found) is not list or not found or type(found[0]) is not str:
                    raise WireError("no reply")
                if found[0] != "call":
                    return found
                send(self._link, self._called_back(found))
        except WireError:
            self._lose("no protocol")
        except OSError:  # it has closed its end
            pass
        return self._lose(self._status(ENDING)["ended"])

    def _result(self, reply: list[Any]) -> tuple[Any, Any]:
        if reply[0] == "done" and len(reply) == 3:
            return reply[1], reply[2]
        if reply[0] == "raise" and len(reply) == 3 and type(reply[2]) is list:
            raise _exception(reply[1], reply[2])
        return self._lose("no protocol")

    def _called_back(self, message: list[Any]) -> str:
        """A function of the tests that the answer was given, and calls."""
        if len(message) != 4 or type(message[2]) is not list or type(message[3]) is not dict:
            raise WireError("no call")
        _, number, arguments, options = message
        function = self._objects[number]
        try:
            return self._dumps(["returned", function(*arguments, **options)])
        except Exception as error:
            name = next(k.__name__ for k in type(error).__mro__ if hasattr(builtins, k.__name__))
            return self._dumps(["raised", name, [str(error)]])

    def _dumps(self, value: Any) -> str:
        return dumps(value, self._export)

    def _export(self, value: Any) -> dict[str, Any]:
        if isinstance(value, Remote):
            return {"object": value._number}
        if callable(value) and not isinstance(value, type):
            return self._objects(value)
        if isinstance(value, Iterator):
            return {"iterator": [json.loads(self._dumps(v)) for v in islice(value, _ITEMS)]}
        return self._give_up(f"the tests pass an object of type {type(value).__name__}")

    def _stand_in(self, tag: str, number: Any) -> Any:
        if tag != "object" or type(number) is not int or number < 0:
            raise WireError("no such object")
        return Remote(self, number)

    def _wait(self) -> None:
        """Until there is a reply, or the call has had its CPU time. A busy machine is no reason."""
        if self.seconds is None:
            return
        began, before = time.monotonic(), self._status()["cpu"]
        left = self.seconds
        while not select.select([self._link], [], [], left)[0]:
            left = self.seconds - (self._status()["cpu"] - before)
            if left <= 0 or time.monotonic() - began > patience(self.seconds):
                self._lose(TIMEOUT)
            left = max(left, 0.01)

    def _status(self, question: bytes = STATUS) -> dict[str, Any]:
        """What the warden says; an answer cannot end its warden."""
        found = ask_warden(self._control, question)
        return found or self._lose(KILLED)

    def _give_up(self, reason: str) -> NoReturn:
        self.unfit = reason
        raise UnfitError(reason)

    def _lose(self, reason: str) -> NoReturn:
        self.lost = reason
        raise LostError(reason)


def _exception(name: Any, arguments: list[Any]) -> BaseException:
    """One of Python's own, by its name."""
    kind = getattr(builtins, name, None) if type(name) is str else None
    if not isinstance(kind, type) or not issubclass(kind, BaseException):
        return Exception()
    try:
        return kind(*arguments)
    except Exception:
        return kind.__new__(kind)


def _may_change(value: Any) -> bool:
    if isinstance(value, tuple):
        return any(map(_may_change, value))
    return isinstance(value, _MUTABLE)


def _restore(old: Any, new: Any) -> Any:
    """`old` with the contents of `new` where it can be changed; else what replaces it."""
    if isinstance(new, Remote) and not isinstance(old, (Remote, *_MUTABLE)):
        return old  # a function or iterator of the tests
    if isinstance(old, Remote) or type(old) is not type(new):
        return new
    if isinstance(old, list | deque):
        kept = [_restore(o, n) for o, n in zip(old, new, strict=False)]
        kept += list(new)[len(kept) :]
        old.clear()
        old.extend(kept)
    elif isinstance(old, dict):
        kept_items = {k: _restore(old[k], v) if k in old else v for k, v in new.items()}
        old.clear()
        old.update(kept_items)
    elif isinstance(old, set):
        old.clear()
        old.update(new)
    elif isinstance(old, bytearray):
        old[:] = new
    elif isinstance(old, tuple) and len(old) == len(new):
        for o, n in zip(old, new, strict=True):
            _restore(o, n)
    else:
        return new
    return old
