"""Runners execute plans. They are the only part that touches a device.

A runner owns one slot (capacity in a KV cache) per sequence. `launch` starts a forward and
`InFlight.wait` returns the statistics of each plan; when the decoders have chosen, `commit` makes
the winners' keys and values the sequences' own, of those that go on or are shared. Where the winner
was forwarded on another device, `staged` there and `install` here do that. `lopa.runner.paged` is
the one in use.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
from torch import Tensor

from lopa.config import DecodeConfig
from lopa.errors import CapacityError, LopaError
from lopa.types import FloatArray, IntArray, Plan, Stats

Plans = Sequence[tuple[int, Plan]]  # (slot, plan)


def check_kv_capacity(tokens: int, capacity: int) -> None:
    """Refuse a request that is larger than the whole KV cache."""
    if tokens > capacity:
        raise CapacityError(
            f"the request needs capacity for {tokens} tokens and the whole KV cache holds "
            f"{capacity}: shorten it, or give the cache more tokens"
        )


def make_stats(token: IntArray, max_prob: FloatArray, ranking: FloatArray) -> Stats:
    """A copy, since a backend may write over its own arrays; refuses what is not a number."""
    if math.isnan(np.add.reduce(max_prob)):
        raise LopaError(
            "the model's logits are not numbers: try another dtype, or fetch the weights again"
        )
    return Stats(token.astype(np.int64), max_prob.astype(np.float64), ranking.astype(np.float64))


@dataclass(frozen=True, slots=True)
class InFlight:
    """A forward that has been launched.

    `wait` returns the statistics of each plan; None: the same plan wants another forward. Another
    forward of the same runner makes this one stale: it is then done again.
    """

    wait: Callable[[], Sequence[Stats | None]]


class Runner(Protocol):
    """What a scheduler needs of a runner; slots are opaque to it."""

    @property
    def is_async(self) -> bool:
        """Whether the device works between `launch` and `wait`."""

    @property
    def lanes(self) -> int:
        """How many forwards may be in flight at once, each of other slots."""

    @property
    def padding(self) -> tuple[tuple[int, int], ...]:
        """(up to so many tokens, to a multiple of so many): how forwards are padded."""

    @property
    def kv_pages(self) -> tuple[int, int] | None:
        """Pages of the KV cache in use, and in all; None where it has none."""

    def check(self, capacity: int) -> None:
        """Refuse what no empty cache could hold."""

    def open(self, config: DecodeConfig, capacity: int, prompt: Sequence[int] = ()) -> int | None:
        """A slot for one sequence of at most `capacity` tokens; None when there is none now.

        prompt: what the sequence begins with; its keys and values may be there already (`reused`).
        """

    def reused(self, slot: int) -> int:
        """How many tokens of a new slot's prompt are cached already."""

    def shares(self, slot: int) -> bool:
        """Whether others may find what the slot's next commit writes, when it is closed too."""

    def close(self, slot: int) -> None: ...

    def cost(self, plan: Plan) -> int:
        """Tokens that the plan adds to a forward, all layers counted."""

    def launch(self, plans: Plans, lane: int = 0) -> InFlight:
        """Start a forward. It is committed, or dropped, before the next one in its lane."""

    def forward(self, plans: Plans) -> Sequence[Stats | None]:
        """`launch` and `wait`."""

    def commit(self, winners: Sequence[tuple[int, int]]) -> None:
        """(slot, winning row) of every plan that the last forward of a lane gave statistics for.

        One that is closed next and shares nothing may be left out.
        """


class SyncRunner(Runner, Protocol):
    """A runner whose `forward` happens in `wait`."""

    @property
    def is_async(self) -> bool:
        return False

    @property
    def lanes(self) -> int:
        return 1

    @property
    def padding(self) -> tuple[tuple[int, int], ...]:
        return ()

    def shares(self, slot: int) -> bool:
        return False

    def launch(self, plans: Plans, lane: int = 0) -> InFlight:
        return InFlight(partial(self.forward, plans))


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
