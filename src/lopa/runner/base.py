"""Runners execute plans. They are the only part that touches a device.

A runner owns one slot (pages of a KV cache) per sequence. `forward` returns the statistics of each
plan; when the decoders have chosen, `commit` makes the winners' keys and values the sequences' own.
Where the winner was forwarded on another device, `staged` there and `install` here do that.
`lopa.runner.paged` is the one in use, `lopa.runner.reference` the plain one it is tested against.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from lopa.config import DecodeConfig
from lopa.errors import CapacityError
from lopa.types import Plan, Stats


def check_capacity(tokens: int, capacity: int) -> None:
    """Refuse a request that is larger than the whole cache."""
    if tokens > capacity:
        raise CapacityError(
            f"the request needs room for {tokens} tokens and the whole cache holds {capacity}: "
            "shorten it, or give the cache more tokens"
        )


class Runner(Protocol):
    """What an engine needs of a runner; slots are opaque to it."""

    def check(self, capacity: int) -> None:
        """Refuse what no empty cache could hold."""

    def open(self, config: DecodeConfig, capacity: int, prompt: Sequence[int] = ()) -> int | None:
        """A slot for one sequence of at most `capacity` tokens; None when there is no room now.

        prompt: what the sequence begins with; its keys and values may be there already (`reused`).
        """

    def reused(self, slot: int) -> int:
        """How many tokens of a new slot's prompt are cached already."""

    def close(self, slot: int) -> None: ...

    def cost(self, plan: Plan) -> int:
        """Tokens that the plan adds to a forward, all layers counted."""

    def begin(self, plans: Sequence[tuple[int, Plan]]) -> bool:
        """Start the forward that will be asked for next, if it can go on by itself meanwhile.

        A hint, given after the commit of the round before: where another forward comes first, the
        work is lost and nothing else.
        """

    def forward(self, plans: Sequence[tuple[int, Plan]]) -> Sequence[Stats | None]:
        """The statistics of each plan; None: the same plan wants another forward."""

    def commit(self, winners: Sequence[tuple[int, int]]) -> None:
        """(slot, winning row) of every plan that the last forward gave statistics for."""


class StagingRunner(Runner, Protocol):
    """A runner whose commits can be carried to another: what branch parallelism needs of one.

    A buffer is flat and contiguous, of the model's dtype and on its device: keys and values of the
    committed tokens of every layer, and the hidden state of the last of them.
    """

    def staging(self, tokens: int) -> Tensor:
        """An unwritten buffer for a commit of so many tokens."""

    def staged(self, slot: int, row: int) -> Tensor:
        """What committing that row of the slot's last forward would write; before `commit`."""

    def install(self, slot: int, plan: Plan, row: int, buffer: Tensor) -> None:
        """Commit what another runner's `staged` gave for that row of the plan."""
