"""Whether an answer passes its tests: one judge for all code.

The tests are in one process, the answer in another; `sandbox/` has both and the walls around them.
The verdict comes from the process of the tests alone, which sees plain values of the answer or
nothing.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from lopa.errors import LopaError
from lopa.evaluation.sandbox import wire
from lopa.evaluation.sandbox.link import ENDING, KILLED, TIMEOUT, ask_warden, patience
from lopa.evaluation.sandbox.tester import ASSERTS, PLUS
from lopa.evaluation.sandbox.walls import NONE
from lopa.evaluation.sandbox.zygote import ANSWER, TESTER
from lopa.evaluation.sandbox.zygote_client import ZYGOTES, GoneError, Kit, Zygote

SECONDS = 3.0  # of CPU, for all that an answer does
MEGABYTES = 256
_TESTER_SECONDS, _TESTER_MEGABYTES = 10.0, 1024  # beside those of the answer
_STANDARD = Kit()


@dataclass(frozen=True, slots=True)
class Outcome:
    """Whether the answer passed, and in a word or two why not."""

    passed: bool
    reason: str


def allow_unsafe_code() -> None:
    """From now on code runs without walls: with this user's files, network and processes."""
    ZYGOTES.walls = (NONE,)


def check_isolation() -> None:
    """Before hours of decoding: LopaError where code could not be judged afterwards."""
    outcome = judge("def f(x): return x + 1", "assert f(1) == 2")
    if not outcome.passed:
        raise LopaError(
            f"generated code is not run, because isolated code does not work here: "
            f"{outcome.reason}. Run it without isolation with --unsafe-code"
        )


def judge(
    answer: str,
    tests: str,
    *,
    given: str = "",
    entry_point: str = "",
    seconds: float = SECONDS,
    megabytes: int = MEGABYTES,
) -> Outcome:
    """Run the answer, then the tests, which end without an exception if it is right.

    Names that the tests do not define are the answer's. With an entry point only that one is,
    beside what is neither Python's nor defined by `given`: trusted code, such as the prompt.
    Never raises for anything that the answer does; LopaError where the tests cannot be judged.
    """
    asked = {"code": tests, "given": given, "entry_point": entry_point}
    return _judged(answer, ASSERTS, asked, _STANDARD, _STANDARD, seconds, megabytes)


def code_of_prompt(prompt: str) -> str:
    """What tests may rely on of a prompt that is code: all of it, or nothing."""
    try:
        compile(prompt, "prompt", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return ""
    return prompt


def judge_plus(
    answer: str,
    tests: Mapping[str, Any],
    *,
    tester: Kit,
    kit: Kit,
    seconds: float,
    megabytes: int,
) -> Outcome:
    """By EvalPlus's scoring: `tests` are the arguments of `plus_tester.judge_plus`."""
    return _judged(answer, PLUS, tests, tester, kit, seconds, megabytes)


def _judged(
    answer: str,
    kind: str,
    tests: Mapping[str, Any],
    tester: Kit,
    kit: Kit,
    seconds: float,
    megabytes: int,
) -> Outcome:
    try:
        answer.encode()
    except UnicodeEncodeError:
        return Outcome(False, "not encodable")
    brief = wire.dumps({"answer": answer, "kind": kind, "tests": dict(tests)}, wire.refuse)
    for _ in range(2):
        zygotes = (ZYGOTES.of(tester), ZYGOTES.of(kit))
        try:
            return _run(brief, *zygotes, seconds, megabytes)
        except GoneError:
            for zygote in zygotes:
                ZYGOTES.drop(zygote)
    raise LopaError("the processes that judge code are killed from outside: see the system's log")


def _run(brief: str, tester: Zygote, kit: Zygote, seconds: float, megabytes: int) -> Outcome:
    with ExitStack() as sockets:

        def pair() -> tuple[socket.socket, socket.socket]:
            ends = socket.socketpair()
            for end in ends:
                sockets.enter_context(end)
            return ends

        link, control, warden, verdict = pair(), pair(), pair(), pair()
        kit.spawn(ANSWER, seconds, megabytes, (control[1], link[1]))
        allowed, room = seconds + _TESTER_SECONDS, max(_TESTER_MEGABYTES, megabytes)
        tester.spawn(TESTER, allowed, room, (warden[1], link[0], control[0], verdict[1]))
        found = _verdict(verdict[0], brief, patience(seconds)) or _ending(warden[0])
    if found["unfit"]:
        raise LopaError(f"the tests cannot be judged: {found['unfit']}. Leave their row out")
    if found["reason"] == KILLED and ZYGOTES.walls != (NONE,):  # nothing in there can do that
        raise GoneError
    return Outcome(found["passed"], found["reason"])


def _verdict(tester: socket.socket, brief: str, seconds: float) -> dict[str, Any] | None:
    """What the tester says; None if it ends without a word."""
    try:
        wire.send(tester.fileno(), brief)
    except OSError:
        return None
    except wire.WireError as error:
        raise LopaError(f"the tests cannot be judged: {error}. Leave their row out") from None
    if not select.select([tester], [], [], seconds)[0]:
        return {"passed": False, "reason": TIMEOUT, "unfit": ""}
    message = wire.receive(tester.fileno())
    return None if message is None else wire.loads(message, wire.no_objects)


def _ending(warden: socket.socket) -> dict[str, Any]:
    """How the tester ended, by what it was given: it does not end by itself without a verdict."""
    found = ask_warden(warden.fileno(), ENDING)
    if found is None:
        raise GoneError
    return {"passed": False, "reason": found["ended"], "unfit": ""}
