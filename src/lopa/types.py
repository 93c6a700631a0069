"""The nouns everybody shares: what a round asks of a runner, what it gets, and its record.

A round is Plan → (runner) → Stats → Round. Positions are absolute: the prompt starts at 0.
Nothing here touches a device.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.floating[Any]]
BoolArray = npt.NDArray[np.bool_]

FillKind = Literal["threshold", "forced", "count", "merged", "edited"]
BlockState = Literal["semi", "active", "to_cache", "in_cache"]
FinishReason = Literal["eos", "stop", "length", "rounds", "filled"]


class Gap(NamedTuple):
    """Masks to be filled between pinned text: what lies before it, and `after`."""

    lengths: tuple[int, ...]  # tokens; of several the most confident length is chosen
    after: tuple[int, ...]  # the tokens behind it: at least one, and none is the mask


class Automaton(Protocol):
    """What decoding needs of `lopa.grammar.token_automaton.TokenAutomaton`, which says more."""

    @property
    def class_of(self) -> npt.NDArray[np.int32]:
        """[vocab] the class of each token; 0: no state allows it."""

    @property
    def next(self) -> npt.NDArray[np.int32]:
        """[states, classes] the state behind a token; -1: not allowed."""

    @property
    def start(self) -> int: ...

    @property
    def distance(self) -> npt.NDArray[np.int32]:
        """[states] fewest tokens to where an answer may end."""


class Constraint(NamedTuple):
    """What the tokens of a plan's rows have to fit.

    Everything left of `start` is filled. Of a row the tokens up to `end`, or to its own end, are
    read; what lies behind is masks, and there are as many as the answer may still have.
    """

    automaton: Automaton
    state: int  # of the automaton before `start`
    start: int  # first position that is read
    end: int  # where reading ends at the latest
    limit: int  # where the answer has to be complete


@dataclass(slots=True, eq=False)
class Plan:
    """One forward of one sequence: R rows over the positions from `start` on.

    Nobody changes it once it is made: it is equal to itself alone.

    A row attends to the cached positions [0, cached) that lie outside its own window, and to its
    window. Rows differ in length when one branch has appended a block and another has not.
    """

    index: int  # round number, from 1
    start: int  # first position forwarded
    cached: int  # length of the cache that is valid before this round
    commit: int  # tokens from `start` whose KV of the winner is written to the cache
    rows: IntArray  # [R, L] tokens; lookaheads in rank order, the anchor last
    row_ends: IntArray  # [R] end of each row, absolute; what lies behind it is padding
    wanted: BoolArray  # [R, L] where statistics are asked for: masks, and tokens to be edited
    block_ids: IntArray | None  # [L] block of each position under block attention, else None
    constraint: Constraint | None = None
    never: tuple[int, ...] = ()  # tokens that are not predicted, beside the mask token
    # [R, L] tokens whose statistics are asked for, in place of the predicted ones; −1: none
    expected: IntArray | None = None


class Stats(NamedTuple):
    """What a runner returns for a plan: [N] each, one entry per True of `wanted`, row-major.

    In fp64, whatever they were computed in: a threshold means the same on every rank.
    """

    token: IntArray  # the argmax, or a sample; never the mask token
    max_prob: FloatArray  # its probability
    ranking: FloatArray  # the confidence that orders positions and scores branches


@dataclass(slots=True)
class Lookahead:
    """A token placed ahead of its turn."""

    position: int
    token: int
    confidence: float  # ranking confidence when it was placed
    max_prob: float


Draft: TypeAlias = tuple[Lookahead, ...]  # what a branch places: one token or several


@dataclass(slots=True)
class Opinion:
    """What the anchor predicts, in the same round, where a branch has placed a token."""

    token: int
    max_prob: float


@dataclass(slots=True)
class Branch:
    """One row of a round, as it was scored. The anchor has no lookaheads."""

    lookaheads: list[Lookahead]
    score: float
    masks: int  # masks it had left, before any fill of this round
    end: int
    eos: bool  # an EOS token has been placed in it
    anchor: list[Opinion] = field(default_factory=list)  # one per lookahead
    refused: str = ""  # why it may not win
    # Probability of the best token at each of those masks, from left to right: a byte in
    # hexadecimal each, ff for probability 1. For looking at; what decides is in Stats.
    landscape: str = ""


@dataclass(slots=True)
class Fill:
    """One token fixed on the winner, from the logits that made it win.

    An edited one replaces a token; each of the others fills a mask.
    """

    position: int
    token: int
    max_prob: float
    kind: FillKind


@dataclass(slots=True)
class BlockView:
    """A block of the winner as the round found it."""

    start: int
    end: int
    state: BlockState
    masks: int


@dataclass(slots=True)
class Round:
    """The record of one round. `seconds` is set by whoever drives the decoder."""

    index: int
    start: int
    cached: int
    committed: int  # tokens whose KV went to the cache
    branches: list[Branch]  # k of them in rank order, and the anchor last: one per row
    winner: int
    fills: list[Fill]
    # Drafts for the next round, in rank order; with branches auto it tries the first few of them.
    spawned: list[list[Lookahead]]
    blocks: list[BlockView]  # those not yet in the cache when the round began
    seconds: float = 0.0


@dataclass(slots=True, repr=False)
class Trace:
    """A whole run: what was asked, every round, and how it ended."""

    prompt_ids: list[int]
    settings: dict[str, Any]
    rounds: list[Round] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    # Display text by token id, where the model has a tokenizer.
    pieces: dict[int, str] = field(default_factory=dict)
    # With gaps: the tokens behind each of them, and how many masks each has.
    pinned_ids: list[list[int]] = field(default_factory=list)
    gap_tokens: list[int] = field(default_factory=list)

    def __repr__(self) -> str:
        return (
            f"Trace({len(self.prompt_ids)} prompt tokens, {len(self.rounds)} rounds, "
            f"finish={self.finish!r})"
        )
