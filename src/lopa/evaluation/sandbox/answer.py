"""The untrusted side: runs the answer, and lets the tester call what it defines.

Nothing here protects anything. The answer may change every line of it: all that it can do is to
send other plain values, or none.
"""

from __future__ import annotations

import builtins
import os
import sys
from types import ModuleType
from typing import Any

from lopa.evaluation.sandbox.wire import Exports, WireError, dumps, loads, receive, refuse, send

NAME = "candidate"


def serve(link: int) -> None:
    """Answer the tester's messages until it closes."""
    module = ModuleType(NAME)
    sys.modules[NAME] = module
    server = _Server(link, module)
    while (message := receive(link)) is not None:
        send(link, server.reply(message))


class _Server:
    def __init__(self, link: int, module: ModuleType) -> None:
        self.link, self.names = link, vars(module)
        self.objects = Exports("object")

    def reply(self, message: bytes) -> str:
        try:
            verb, *words = self.loads(message)
            return getattr(self, f"do_{verb}")(*words)  # type: ignore[no-any-return]
        except BaseException as error:
            return self.dumps(["raise", *_described(error)])

    def do_run(self, code: str) -> str:
        exec(compile(code, NAME, "exec", dont_inherit=True), self.names)
        return self.done(None)

    def do_name(self, name: str) -> str:
        if name not in self.names:
            return self.dumps(["undefined"])
        return self.done(self.names[name])

    def do_call(self, function: Any, given: str, plain: bool) -> str:
        """The result, and the arguments where the call has changed them."""
        arguments, options = self.loads(given)
        result = function(*arguments, **options)
        after = None if plain else self.dumps([arguments, options])
        return self.done(result, None if after == given else after)

    def do_attribute(self, value: Any, name: str) -> str:
        return self.done(getattr(value, name))

    def do_item(self, value: Any, key: Any) -> str:
        return self.done(value[key])

    def do_iter(self, value: Any) -> str:
        return self.done(iter(value))

    def do_next(self, value: Any) -> str:
        return self.done(next(value))

    def do_len(self, value: Any) -> str:
        return self.done(len(value))

    def done(self, value: Any, after: str | None = None) -> str:
        return self.dumps(["done", value, after])

    def dumps(self, value: Any) -> str:
        return dumps(value, self.objects)

    def loads(self, message: str | bytes) -> Any:
        return loads(message, self.stand_in)

    def stand_in(self, tag: str, number: Any) -> Any:
        if tag == "object":
            return self.objects[number]
        if tag == "iterator":
            return iter(number)

        def function(*arguments: Any, **options: Any) -> Any:
            send(self.link, self.dumps(["call", number, list(arguments), options]))
            while (message := receive(self.link)) is not None:
                verb, *words = self.loads(message)
                if verb == "returned":
                    return words[0]
                if verb == "raised":
                    raise getattr(builtins, words[0])(*words[1])
                send(self.link, self.reply(message))
            os._exit(0)

        return function


def _described(error: BaseException) -> tuple[str, list[Any]]:
    """The nearest of Python's own exceptions, and its arguments where they are plain."""
    kinds = type(error).__mro__
    name = next(k.__name__ for k in kinds if getattr(builtins, k.__name__, None) is k)
    try:
        arguments = list(error.args)
        dumps(arguments, refuse)
    except (WireError, RecursionError):
        return name, []
    return name, arguments
