"""What the API asks of an engine process, and what comes back: a job, and its events in order.

Accepted, then an Advance a round, then Finished; or Failed at any point. All of it is plain data
that JSON can carry.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeAlias

FailureKind = Literal[
    "invalid",  # the request cannot be honoured: the caller's to mend
    "engine",  # the engine failed on it
    "lost",  # it could not be carried on after the engine was started again
    "shutdown",  # the server is going down
]


@dataclass(slots=True, kw_only=True)
class Job:
    """One answer to make."""

    id: str
    prompt: Any  # text, chat messages or token ids
    options: dict[str, Any] = field(default_factory=dict)  # fields of DecodeConfig, as given
    nth: int = 0  # of the answers to its prompt: added to the seed
    max_tokens: int | None = None  # None: the default, or what the context leaves
    stream: bool = False  # somebody has read its events by the time of a restart
    denoise: bool = False  # events carry the rounds in full
    logprobs: bool = False


@dataclass(slots=True, kw_only=True)
class Accepted:
    """The job can be run, and waits for its turn."""

    prompt_tokens: int
    max_tokens: int
    line: str | None = None  # denoise: the `run` line, as JSON


@dataclass(slots=True, kw_only=True)
class Token:
    """A final token, with the logarithm of its probability when it was filled."""

    id: int
    text: str
    bytes: list[int]
    logprob: float


@dataclass(slots=True, kw_only=True)
class Advance:
    """A round has been run."""

    round: int
    text: str  # what became final in it
    filled: int  # new tokens that are no longer masks
    settled: int  # new tokens that have become text
    seconds: float
    rank: int  # of the winning branch: 1 is the first lookahead, 0 the anchor
    branches: int  # rows that competed
    tokens: list[Token] = field(default_factory=list)  # logprobs: those that became text
    line: str | None = None  # denoise: the `round` line, as JSON


@dataclass(slots=True, kw_only=True)
class Finished:
    """The answer is complete."""

    finish: str
    tokens: int
    rounds: int
    tpf: float
    seconds: float  # spent in its rounds
    queue_seconds: float  # waited before them
    engine_seconds: float  # in all, from the job's coming to the end
    line: str | None = None  # denoise: the `end` line, as JSON


@dataclass(slots=True, kw_only=True)
class Failed:
    """There will be no answer."""

    kind: FailureKind
    message: str
    param: str | None = None  # the request's field that is to blame


Event: TypeAlias = Accepted | Advance | Finished | Failed

_KINDS: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (Accepted, Advance, Finished, Failed)
}


def pack(event: Event) -> list[Any]:
    """[kind, fields], for JSON."""
    values = {f.name: getattr(event, f.name) for f in fields(event)}
    if isinstance(event, Advance):
        values["tokens"] = [[t.id, t.text, t.bytes, t.logprob] for t in event.tokens]
    return [type(event).__name__, values]


def unpack(packed: list[Any]) -> Event:
    kind, values = packed
    if kind == "Advance":
        values["tokens"] = [
            Token(id=i, text=text, bytes=raw, logprob=logprob)
            for i, text, raw, logprob in values["tokens"]
        ]
    event: Event = _KINDS[kind](**values)
    return event
