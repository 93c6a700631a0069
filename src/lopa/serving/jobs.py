"""What the API sends to an engine process, and what comes back: a job, and its events in order.

Events: Accepted, then one Advance per round, then Finished; or Failed at any point. All of it is
plain data that JSON can carry.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeAlias

FailureKind = Literal[
    "invalid",  # the request is wrong; the caller can fix it
    "engine",  # the engine failed on it
    "lost",  # it could not be resumed after a restart of the engine
    "unavailable",  # the engine does not start
    "shutdown",  # the server is shutting down
]


PATTERNS = ("schema", "regex")  # options that are compiled before a job runs


@dataclass(slots=True, kw_only=True)
class Job:
    """One sequence to decode: one choice of a response."""

    id: str
    prompt: Any  # text, chat messages or token ids
    suffix: str | list[int] | None = None  # infilling: the text behind the gap, or its token ids
    gap_tokens: int | list[int] | None = None  # of the gap, or lengths to try; None: any
    options: dict[str, Any] = field(default_factory=dict)  # fields of DecodeConfig, as given
    seed_offset: int = 0  # added to the seed: choice i of a prompt has seed + i
    max_tokens: int | None = None  # None: the default, or what the context leaves
    stream: bool = False  # its events are sent to the client at once
    denoise: bool = False  # events carry trace lines
    logprobs: bool = False
    tokenize: bool = False  # only the tokens of the prompt are wanted: nothing is decoded
    # Of the rounds that an engine which was lost has reported: they are run again as they were.
    known_branches: list[int] = field(default_factory=list)

    def message(self) -> dict[str, Any]:
        """Its fields, not copied: a prompt may be long."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


def prompt_characters(prompt: Any) -> int | None:
    """Characters of a text or of chat messages; None for token ids."""
    if isinstance(prompt, str):
        return len(prompt)
    if prompt and isinstance(prompt[0], dict):
        return sum(len(message["content"]) for message in prompt)
    return None


@dataclass(slots=True, kw_only=True)
class Accepted:
    """The job is valid, and waits for its turn; the only event of one that is tokenized."""

    prompt_tokens: int
    max_tokens: int
    token_ids: list[int] = field(default_factory=list)  # tokenize: of the prompt
    trace_line: str | None = None  # denoise: the `run` line, as JSON


@dataclass(slots=True, kw_only=True)
class Token:
    """A final token, with its log probability when it was filled."""

    text: str
    bytes: list[int]
    logprob: float


@dataclass(slots=True, kw_only=True)
class Advance:
    """A round has run."""

    round: int
    text: str  # final text that it added
    filled: int  # new tokens that are no longer masks
    seconds: float
    winner_rank: int  # of the winning branch: 1 is the first lookahead, 0 the anchor
    branches: int  # rows that competed, the anchor included
    expected_gain: float = 0.0  # tokens that auto expected its branches to add
    tokens: list[Token] = field(default_factory=list)  # logprobs: the tokens of `text`
    trace_line: str | None = None  # denoise: the `round` line, as JSON


@dataclass(slots=True, kw_only=True)
class Finished:
    """The output is complete."""

    finish: str
    tokens: int
    rounds: int
    tpf: float
    branches: float  # of a round, on average
    seconds: float  # in its rounds
    queue_seconds: float  # before the first of them
    engine_seconds: float  # from the arrival of the job to its end
    trace_line: str | None = None  # denoise: the `end` line, as JSON


@dataclass(slots=True, kw_only=True)
class Failed:
    """There will be no output."""

    kind: FailureKind
    message: str
    param: str | None = None  # the field of the request that is wrong
    retry_after: int | None = None  # seconds, where it may succeed later


Event: TypeAlias = Accepted | Advance | Finished | Failed

_KINDS: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (Accepted, Advance, Finished, Failed)
}
_FIELDS = {name: [f.name for f in fields(kind)] for name, kind in _KINDS.items()}


def pack(event: Event) -> list[Any]:
    """[kind, values of its fields], for JSON."""
    kind = type(event).__name__
    values = [getattr(event, name) for name in _FIELDS[kind]]
    if isinstance(event, Advance) and event.tokens:
        at = _FIELDS[kind].index("tokens")
        values[at] = [[t.text, t.bytes, t.logprob] for t in event.tokens]
    return [kind, values]


def unpack(packed: list[Any]) -> Event:
    kind, values = packed
    named = dict(zip(_FIELDS[kind], values, strict=True))
    if kind == "Advance" and named["tokens"]:
        named["tokens"] = [
            Token(text=text, bytes=raw, logprob=logprob) for text, raw, logprob in named["tokens"]
        ]
    event: Event = _KINDS[kind](**named)
    return event
