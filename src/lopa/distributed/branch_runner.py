"""Branch parallelism: a runner that forwards its assignment of the rows and learns the rest.

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
from lopa.distributed.row_assignment import RowAssignment, assign_rows
from lopa.distributed.stats_codec import Packing
from lopa.errors import RankError
from lopa.runner.base import StagingRunner, SyncRunner
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


class BranchRunner(SyncRunner):
    """A runner over a runner of this rank. A forward ends with an exchange between all ranks."""

    def __init__(
        self, local: StagingRunner, mesh: Mesh, weights: Sequence[float] | None = None
    ) -> None:
        self.local = local
        self.mesh = mesh
        self.weights = weights  # how fast each replica is; equal unless given
        self.spent = Spent()
        # A supervisor's commands: how many this rank has received, and how many all have.
        self.commands_received: Callable[[], int] = int
        self.commands_agreed = 0
        self.on_phase: Callable[[str], None] = lambda phase: None  # told what this rank is at
        self._configs: dict[int, DecodeConfig] = {}
        self._plans: dict[int, tuple[Plan, RowAssignment]] = {}  # forwarded and not yet committed
        self._state = 0  # checksum of everything that the decoders were told

    @property
    def kv_pages(self) -> tuple[int, int] | None:
        return self.local.kv_pages

    def check(self, capacity: int) -> None:
        self.local.check(capacity)

    def open(self, config: DecodeConfig, capacity: int, prompt: Sequence[int] = ()) -> int | None:
        slot = self.local.open(config, capacity, prompt)
        if slot is not None:
            self._configs[slot] = config
        return slot

    def reused(self, slot: int) -> int:
        return self.local.reused(slot)

    def shares(self, slot: int) -> bool:
        return self.local.shares(slot)

    def cost(self, plan: Plan) -> int:
        """Of the rank with most to do."""
        if len(plan.rows) == 1:
            return self.local.cost(plan)
        return int(-(-len(plan.rows) // self.mesh.branch_parallel) * plan.rows.shape[1])

    def close(self, slot: int) -> None:
        self._plans.pop(slot, None)
        del self._configs[slot]
        self.local.close(slot)

    def forward(self, plans: Sequence[tuple[int, Plan]]) -> list[Stats | None]:
        began = time.perf_counter()
        mesh = self.mesh
        self.on_phase("forward")
        assignments = assign_rows(plans, mesh.branch_parallel, self.weights)
        self._plans = {
            s: (p, assignment) for (s, p), assignment in zip(plans, assignments, strict=True)
        }
        cut = [
            (index, (slot, assignment.rows_of(plan, mesh.replica_rank)))
            for index, ((slot, plan), assignment) in enumerate(zip(plans, assignments, strict=True))
            if len(assignment.rows[mesh.replica_rank])
        ]
        found: list[Stats | None] = [None] * len(plans)
        if cut:
            own = self.local.forward([part for _, part in cut])
            for (index, _), some in zip(cut, own, strict=True):
                found[index] = some
        here = time.perf_counter()
        packing = Packing(
            [plan for _, plan in plans],
            assignments,
            mesh.branch_parallel,
            mesh.tensor_parallel,
            wide=any(self._configs[slot].needs_fp64 for slot, _ in plans),
        )
        self.on_phase("waiting")
        state = self._checksum(plans)
        packed = packing.pack(
            mesh.replica_rank, mesh.tensor_rank, (state, self.commands_received(), here), found
        )
        gathered = mesh.gather(torch.from_numpy(packed)).numpy()
        headers = packing.headers(gathered)
        self._compare(headers["state"])
        self.on_phase("host")
        self.commands_agreed = int(headers["commands"].min())
        stats = packing.unpack(gathered)
        # What was gathered, clocks aside, is the same on every rank: it joins the state.
        self._state = zlib.crc32(gathered[:, headers.dtype.itemsize :].tobytes(), state)
        ended = time.perf_counter()
        last = min(float(headers["clock"].max()), ended)
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
        sent: dict[int, list[tuple[int, int]]] = {}  # by replica: (slot, row) that others lack
        for slot, winner in winners:
            plan, assignment = self._plans.pop(slot)
            rows = assignment.rows[self.mesh.replica_rank]
            same = not plan.commit or plan.block_ids is not None  # any row will do
            if assignment.holds(self.mesh.replica_rank, winner):
                own.append((slot, int(np.flatnonzero(rows == winner)[0])))
            elif same and len(rows):
                own.append((slot, 0))
            everywhere = all(
                assignment.holds(replica, winner) for replica in range(self.mesh.branch_parallel)
            )
            if not same and not everywhere:
                sent.setdefault(int(assignment.owner[winner]), []).append((slot, winner))
                self._plans[slot] = plan, assignment
        self.on_phase("commit")
        received: list[tuple[int, Plan, int, Tensor]] = []
        for replica in sorted(sent):
            received += self._broadcast(replica, sent[replica])
        if own:
            self.local.commit(own)
        for slot, plan, winner, buffer in received:
            self.local.install(slot, plan, winner, buffer)
        self._plans = {}
        self.on_phase("host")
        self.spent.ended = time.perf_counter()
        self.spent.commit = self.spent.ended - began

    def _broadcast(
        self, source: int, winners: Sequence[tuple[int, int]]
    ) -> list[tuple[int, Plan, int, Tensor]]:
        """One buffer with what these winners commit, and those of its parts to install here."""
        here = self.mesh.replica_rank
        plans = [self._plans[slot] for slot, _ in winners]
        if here == source:
            parts = [
                self.local.staged(slot, int(np.flatnonzero(assignment.rows[here] == row)[0]))
                for (slot, row), (_, assignment) in zip(winners, plans, strict=True)
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
            for (slot, row), (plan, assignment), part in zip(winners, plans, parts, strict=True)
            if not assignment.holds(here, row)
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
