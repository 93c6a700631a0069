"""What more devices would give: from the round times of one, measured, and a link, assumed.

Measured are forwards of 1 … n rows on one device, and the host's share of a round. Modelled is all
that needs a second device:
- a replica of a group of b forwards ceil((k + 1) / b) rows, at the measured time of so many
  (between two measured numbers of rows: on the line between them);
- the all-gather is a latency times log2 of the ranks, and its bytes over the bandwidth;
- a commit happens once in block / TPF rounds, a broadcast likewise;
- of a replica in t parts, what the device's ceilings demand (`floor_ms`) takes a t-th of the time,
  the rest of the forward is not made faster, and two sums a layer come on top.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lopa.distributed.row_assignment import assign_rows
from lopa.distributed.stats_codec import Packing
from lopa.errors import ConfigError
from lopa.models.config import ModelConfig
from lopa.models.part import degrees
from lopa.types import Plan

BLOCK = 32
# The paper's throughput runs on H200s: (branch-parallel, tokens a second, from … to). MBPP.
PAPER = ((4, 415.0, 550.0), (8, 708.5, 708.5))
PAPER_TPF = 15.55  # of its BP8 run on MBPP, which makes a round 22 ms


@dataclass(frozen=True, slots=True)
class Link:
    """Assumed, not measured."""

    gigabytes_per_second: float = 300.0
    microseconds: float = 15.0  # latency of one step of a collective
    host_milliseconds: float = 0.2  # packing, unpacking and checking a round's statistics

    def collective(self, ranks: int, size: float) -> float:
        """Milliseconds."""
        if ranks == 1:
            return 0.0
        steps = math.ceil(math.log2(ranks))
        return steps * self.microseconds / 1e3 + size / self.gigabytes_per_second / 1e6


@dataclass(frozen=True, slots=True)
class Point:
    """A round of one shape of group, in milliseconds."""

    branch_parallel: int
    tensor_parallel: int
    measured: bool
    forward_ms: float
    gather_ms: float
    commit_ms: float
    reduce_ms: float
    host_ms: float
    tokens_per_second: float

    @property
    def round_ms(self) -> float:
        parts = self.forward_ms, self.gather_ms, self.commit_ms, self.reduce_ms, self.host_ms
        return sum(parts)

    @property
    def devices(self) -> int:
        return self.branch_parallel * self.tensor_parallel


class Scaling:
    """found: what `lopa bench round --json` printed; config: of the model it timed."""

    def __init__(
        self, found: Mapping[str, Any], config: ModelConfig, window: int, link: Link
    ) -> None:
        lines = [r for r in found["rounds"] if r["window"] == window]
        if len(lines) < 2:
            raise ConfigError(f"the file has fewer than two rounds with a window of {window}")
        lines.sort(key=lambda r: int(r["branches"]))
        self.config, self.window, self.link = config, window, link
        self.rows = [r["branches"] + 1 for r in lines]
        self.forwards = [float(r["forward_ms"]) for r in lines]
        self.floors = [float(r["floor_ms"]) for r in lines]
        self.hosts = [float(r["round_ms"] - r["forward_ms"]) for r in lines]
        self.bytes = 8 if found["host"]["dtype"] == "float64" else 4
        if found["host"]["dtype"] in ("bfloat16", "float16"):
            self.bytes = 2

    def point(self, k: int, tpf: float, branches: int, tensors: int) -> Point:
        if k + 1 > max(self.rows) and branches == 1:
            raise ConfigError(f"{k} branches were not measured: the most is {max(self.rows) - 1}")
        rows, link, config = -(-(k + 1) // branches), self.link, self.config
        forward = _between(rows, self.rows, self.forwards)
        floor = _between(rows, self.rows, self.floors)
        gather = commit = reduce = 0.0
        world = branches * tensors
        if world > 1:
            sent = world * self._packed(k, branches, tensors)
            gather = link.host_milliseconds + link.collective(world, sent)
        if branches > 1:
            token = 2 * config.layers * config.kv_heads * config.head_dim * self.bytes
            commit = link.collective(branches, BLOCK * token / tensors) * tpf / BLOCK
        if tensors > 1:
            forward -= floor * (1 - 1 / tensors)
            size = rows * self.window * config.hidden_size * self.bytes
            each = link.collective(tensors, 2 * size * (tensors - 1) / tensors)
            reduce = (2 * config.layers + 1) * each
        host = _between(k + 1, self.rows, self.hosts)
        total = forward + gather + commit + reduce + host
        measured = world == 1 and k + 1 in self.rows
        return Point(
            branches, tensors, measured, forward, gather, commit, reduce, host, 1e3 * tpf / total
        )

    def points(
        self, k: int, tpf: float, branches: Sequence[int], tensors: Sequence[int]
    ) -> list[Point]:
        """Degrees of tensor parallelism that do not cut the model evenly are left out."""
        possible = set(degrees(self.config))
        return [self.point(k, tpf, b, t) for t in tensors if t in possible for b in branches]

    def _packed(self, k: int, branches: int, tensors: int) -> int:
        """Bytes that a rank sends in a round whose window is all masks."""
        shape = (k + 1, self.window)
        ends = np.full(k + 1, self.window)
        plan = Plan(1, 0, 0, 0, np.zeros(shape, np.int64), ends, np.ones(shape, np.bool_), None)
        return Packing([plan], assign_rows([(0, plan)], branches), branches, tensors, False).size()


def _between(x: float, at: Sequence[float], values: Sequence[float]) -> float:
    """On the line through the neighbours, also beyond the last two."""
    index = min(max(int(np.searchsorted(at, x)), 1), len(at) - 1)
    low, high = at[index - 1], at[index]
    share = (x - low) / (high - low)
    return values[index - 1] * (1 - share) + values[index] * share
