"""Branch parallelism: a runner that forwards its share of the rows and learns the rest.

Every rank is handed the same plans, because every rank runs the same pure decoders: there is no
master and nothing to scatter. A round is one all-gather of statistics, and under full attention one
broadcast of what the winner commits, from each rank that has winners. Under block attention every
rank can write the commit itself.
"""

from __future__ import annotations

import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lopa.config import DecodeConfig
from lopa.distributed.mesh import Mesh
from lopa.distributed.row_assignment import Share, split
from lopa.distributed.stats_codec import Packing
from lopa.errors import RankError
from lopa.runner.base import StagingRunner
from lopa.types import Plan, Stats


@dataclass(slots=True)
class Spent:
    """Seconds and bytes of a round, on one rank."""

    forward: float = 0.0
    idle: float = 0.0  # waiting for the last rank; needs the ranks' clocks to be one
    gather: float = 0.0
    commit: float = 0.0
    began: float = 0.0
    ended: float = 0.0
    statistics_bytes: int = 0  # that all ranks together sent
    commit_bytes: int = 0  # of what winners' ranks broadcast, each counted once
    commits: int = 0  # broadcasts


class BranchParallel:
    """A `Runner` over a runner of this rank."""

    def __init__(
        self, local: StagingRunner, mesh: Mesh, weights: Sequence[float] | None = None
    ) -> None:
        self.local = local
        self.mesh = mesh
        self.weights = weights  # how fast each replica is; equal unless given
        self.spent = Spent()
        # What a supervisor's commands need: how many this rank has, and how many all have.
        self.heard: Callable[[], int] = int
        self.agreed = 0
        self.entered: Callable[[str], None] = _nobody  # told what this rank is at
        self._configs: dict[int, DecodeConfig] = {}
        self._plans: dict[int, tuple[Plan, Share]] = {}  # forwarded and not yet committed
        self._state = 0  # checksum of everything that the decoders were told

    def check(self, capacity: int) -> None:
        self.local.check(capacity)

    def open(self, config: DecodeConfig, capacity: int, prompt: Sequence[int] = ()) -> int | None:
        slot = self.local.open(config, capacity, prompt)
        if slot is not None:
            self._configs[slot] = config
        return slot

    def reused(self, slot: int) -> int:
        return self.local.reused(slot)

    def cost(self, plan: Plan) -> int:
        """Of the rank with most to do."""
        if len(plan.rows) == 1:
            return self.local.cost(plan)
        return int(-(-len(plan.rows) // self.mesh.branches) * plan.rows.shape[1])

    def begin(self, plans: Sequence[tuple[int, Plan]]) -> bool:
        return False  # a forward ends with what all ranks say to each other

    def close(self, slot: int) -> None:
        self._plans.pop(slot, None)
        del self._configs[slot]
        self.local.close(slot)

    def forward(self, plans: Sequence[tuple[int, Plan]]) -> list[Stats | None]:
        began = time.perf_counter()
        mesh = self.mesh
        self.entered("forward")
        shares = split(plans, mesh.branches, self.weights)
        self._plans = {s: (p, share) for (s, p), share in zip(plans, shares, strict=True)}
        cut = [
            (index, (slot, share.cut(plan, mesh.branch)))
            for index, ((slot, plan), share) in enumerate(zip(plans, shares, strict=True))
            if len(share.rows[mesh.branch])
        ]
        found: list[Stats | None] = [None] * len(plans)
        if cut:
            own = self.local.forward([part for _, part in cut])
            for (index, _), some in zip(cut, own, strict=True):
                found[index] = some
        here = time.perf_counter()
        packing = Packing(
            [plan for _, plan in plans],
            shares,
            mesh.branches,
            mesh.tensors,
            wide=any(self._configs[slot].needs_fp64 for slot, _ in plans),
        )
        self.entered("waiting")
        state = self._checksum(plans)
        packed = packing.pack(mesh.branch, mesh.tensor, (state, self.heard(), here), found)
        gathered = mesh.gather(torch.from_numpy(packed)).numpy()
        heads = packing.heads(gathered)
        self._compare(heads["state"])
        self.entered("host")
        self.agreed = int(heads["heard"].min())
        stats = packing.unpack(gathered)
        # What was gathered, clocks aside, is the same on every rank: it joins the state.
        self._state = zlib.crc32(gathered[:, heads.dtype.itemsize :].tobytes(), state)
        ended = time.perf_counter()
        last = min(float(heads["clock"].max()), ended)
        idle = max(0.0, last - here)
        self.spent = Spent(
            forward=here - began,
            idle=idle,
            gather=ended - here - idle,
            began=began,
            ended=ended,
            statistics_bytes=gathered.size if mesh.world > 1 else 0,
        )
        return stats

    @torch.inference_mode()
    def commit(self, winners: Sequence[tuple[int, int]]) -> None:
        began = time.perf_counter()
        own: list[tuple[int, int]] = []  # this rank commits a row of its own
        sent: dict[int, list[tuple[int, int]]] = {}  # by rank: (slot, row) that others lack
        for slot, winner in winners:
            plan, share = self._plans.pop(slot)
            rows = share.rows[self.mesh.branch]
            same = not plan.commit or plan.block_ids is not None  # any row will do
            if share.holds(self.mesh.branch, winner):
                own.append((slot, int(np.flatnonzero(rows == winner)[0])))
            elif same and len(rows):
                own.append((slot, 0))
            everywhere = all(share.holds(rank, winner) for rank in range(self.mesh.branches))
            if not same and not everywhere:
                sent.setdefault(int(share.owner[winner]), []).append((slot, winner))
                self._plans[slot] = plan, share
        self.entered("commit")
        received: list[tuple[int, Plan, int, Tensor]] = []
        for rank in sorted(sent):
            received += self._broadcast(rank, sent[rank])
        if own:
            self.local.commit(own)
        for slot, plan, winner, buffer in received:
            self.local.install(slot, plan, winner, buffer)
        self._plans = {}
        self.entered("host")
        self.spent.ended = time.perf_counter()
        self.spent.commit = self.spent.ended - began

    def _broadcast(
        self, source: int, winners: Sequence[tuple[int, int]]
    ) -> list[tuple[int, Plan, int, Tensor]]:
        """One buffer with what these winners commit, and those of its parts to install here."""
        here = self.mesh.branch
        plans = [self._plans[slot] for slot, _ in winners]
        if here == source:
            parts = [
                self.local.staged(slot, int(np.flatnonzero(share.rows[here] == row)[0]))
                for (slot, row), (_, share) in zip(winners, plans, strict=True)
            ]
            whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        else:
            parts = [self.local.staging(plan.commit) for plan, _ in plans]
            sizes = [len(part) for part in parts]
            whole = parts[0] if len(parts) == 1 else parts[0].new_empty(sum(sizes))
            parts = list(torch.split(whole, sizes))
        self.mesh.broadcast(whole, source)
        self.spent.commits += 1
        self.spent.commit_bytes += whole.numel() * whole.element_size()
        return [
            (slot, plan, row, part)
            for (slot, row), (plan, share), part in zip(winners, plans, parts, strict=True)
            if not share.holds(here, row)
        ]

    def _checksum(self, plans: Sequence[tuple[int, Plan]]) -> int:
        """Of what the decoders want next, on top of all that they were told."""
        state = self._state
        for slot, plan in plans:
            state = zlib.crc32(repr((slot, plan.index, plan.start, plan.commit)).encode(), state)
            state = zlib.crc32(np.ascontiguousarray(plan.rows).data, state)
        return state

    def _compare(self, states: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> None:
        if (states == states[0]).all():
            return
        common, count = Counter(states.tolist()).most_common(1)[0]
        others = [str(rank) for rank, state in enumerate(states.tolist()) if state != common]
        who = f"rank {', '.join(others)} computes something else than the others"
        if 2 * count <= len(states):
            who = "the ranks compute different things"
        raise RankError(f"{who}: the states of their decoders differ")


def _nobody(phase: str) -> None:
    pass
