"""The trusted side: holds the tests, runs them, and writes the verdict."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable
from typing import Any

from lopa.evaluation.sandbox.link import Link, UnfitError
from lopa.evaluation.sandbox.names import Names
from lopa.evaluation.sandbox.wire import dumps, loads, no_objects, receive, refuse, send

ASSERTS, PLUS = "asserts", "plus"


def judge(link: Link, brief: dict[str, Any]) -> None:
    """Returns if the answer passes, and raises if not. `brief` says by what it is tested."""
    link.run(brief["answer"])
    _KINDS[brief["kind"]](link, **brief["tests"])


def _judge_asserts(link: Link, *, code: str, given: str, entry_point: str) -> None:
    """`given`, where there is an entry point: what the tests may rely on beside it."""
    try:
        tree = ast.parse(code)
        program = compile(tree, "tests", "exec", dont_inherit=True)
        known: dict[str, Any] = {"__name__": "tests"}
        exec(compile(given, "given", "exec", dont_inherit=True), known)
    except Exception as error:
        raise UnfitError(f"{type(error).__name__}: {error}") from None
    known.pop(entry_point, None)
    exec(program, Names(tree, link, known, entry_point))


def _judge_plus(link: Link, **tests: Any) -> None:
    from lopa.evaluation.sandbox.plus_tester import judge_plus

    judge_plus(link, **tests)


_KINDS: dict[str, Callable[..., None]] = {ASSERTS: _judge_asserts, PLUS: _judge_plus}


def serve(link: int, control: int, verdict: int) -> None:
    """Read the brief, judge, and write the verdict."""
    message = receive(verdict)
    if message is None:
        return
    brief = loads(message, no_objects)
    caller = Link(link, control)
    passed, reason, unfit = False, "", ""
    try:
        judge(caller, brief)
        passed, reason = True, "passed"
    except UnfitError as error:
        unfit = str(error)
    except BaseException as error:
        reason = _name(error)
    if caller.lost:
        passed, reason = False, caller.lost
    found = {"passed": passed, "reason": reason, "unfit": caller.unfit or unfit}
    send(verdict, dumps(found, refuse))


def _name(error: BaseException) -> str:
    """Of the nearest of Python's own exceptions."""
    kinds = type(error).__mro__
    return next(str(k.__name__) for k in kinds if getattr(builtins, k.__name__, None) is k)
