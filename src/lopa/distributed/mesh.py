"""The ranks of a group as `branch` × `tensor`, and the few collectives that a round needs.

Ranks that hold the parts of one replica are neighbours:
rank = replica_rank · tensor_parallel + tensor_rank. A mesh of one rank needs no process group.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lopa.config import RANK_TIMEOUT
from lopa.errors import ConfigError, RankError

BACKENDS = {"cuda": "nccl", "npu": "hccl"}  # everything else: gloo
_LOADING_TIMEOUT = timedelta(minutes=30)  # while models are read; afterwards the rank timeout holds


@dataclass(slots=True)
class Mesh:
    rank: int
    branch_parallel: int  # replicas
    tensor_parallel: int  # ranks of a replica
    device: torch.device
    backend: str = "gloo"
    timeout: float = RANK_TIMEOUT  # seconds that a rank waits for the others
    # Groups of this rank; None on a mesh of one.
    everyone: Any = None
    across: Any = None  # the same part of every replica
    within: Any = None  # all parts of one replica

    @property
    def world(self) -> int:
        return self.branch_parallel * self.tensor_parallel

    @property
    def replica_rank(self) -> int:
        """Which replica this rank is part of."""
        return self.rank // self.tensor_parallel

    @property
    def tensor_rank(self) -> int:
        """Which part of it."""
        return self.rank % self.tensor_parallel

    @classmethod
    def join(
        cls,
        rank: int,
        world: int,
        *,
        branch_parallel: int,
        tensor_parallel: int,
        device: torch.device,
        backend: str,
        timeout: float,
        store: Any,  # a torch.distributed Store; None: where the environment says
    ) -> Mesh:
        """Meet the other ranks at the store. Every rank calls it, and waits for all."""
        check_degrees(world, branch_parallel, tensor_parallel)
        mesh = cls(rank, branch_parallel, tensor_parallel, device, backend, timeout)
        if world == 1:
            return mesh
        where = {"store": store} if store is not None else {"init_method": "env://"}
        dist.init_process_group(
            backend, **where, rank=rank, world_size=world, timeout=_LOADING_TIMEOUT
        )
        ranks = torch.arange(world).view(branch_parallel, tensor_parallel)
        # Groups are made by all ranks in the same order, whether they are in them or not.
        mesh.everyone = mesh._group(list(range(world)))
        for part in range(tensor_parallel):
            group = mesh._group(ranks[:, part].tolist())
            mesh.across = group if part == mesh.tensor_rank else mesh.across
        for replica in range(branch_parallel):
            group = mesh._group(ranks[replica].tolist())
            mesh.within = group if replica == mesh.replica_rank else mesh.within
        return mesh

    def _group(self, ranks: list[int]) -> Any:
        return dist.new_group(ranks, timeout=timedelta(seconds=self.timeout))

    def barrier(self) -> None:
        """Wait, without the rank timeout, until every rank is here: models take long to read."""
        if self.world > 1:
            with _as_rank_error():
                dist.barrier()

    def close(self) -> None:
        if self.world > 1 and dist.is_initialized():
            dist.destroy_process_group()

    def gather(self, part: Tensor) -> Tensor:
        """[bytes] of this rank, on the host → [world, bytes]; every rank gives as many."""
        if self.world == 1:
            return part[None]
        found = torch.empty(self.world * len(part), dtype=part.dtype, device=self._sending_device)
        with _as_rank_error():
            _all_gather(found, part.to(found.device), self.everyone)
            return found.view(self.world, -1).cpu()

    def broadcast(self, buffer: Tensor, replica: int) -> None:
        """From the same part of that replica, into `buffer`, to every other replica."""
        if self.branch_parallel > 1:
            source = replica * self.tensor_parallel + self.tensor_rank
            sent = self._sendable(buffer)
            with _as_rank_error():
                dist.broadcast(sent, source, group=self.across)
            if sent is not buffer:
                buffer.copy_(sent)

    def sum_over_parts(self, values: Tensor) -> Tensor:
        """In place, over the parts of a replica."""
        if self.tensor_parallel > 1:
            sent = self._sendable(values)
            with _as_rank_error():
                dist.all_reduce(sent, group=self.within)
            if sent is not values:
                values.copy_(sent)
        return values

    def gather_parts(self, values: Tensor) -> Tensor:
        """Of every part of this replica: [tensor_parallel, …]."""
        if self.tensor_parallel == 1:
            return values[None]
        flat = self._sendable(values.contiguous().view(-1))
        found = torch.empty(self.tensor_parallel * len(flat), dtype=flat.dtype, device=flat.device)
        with _as_rank_error():
            _all_gather(found, flat, self.within)
        return found.view(self.tensor_parallel, *values.shape).to(values.device)

    @property
    def _sending_device(self) -> torch.device:
        """Where collectives take their tensors: gloo's on the host."""
        return torch.device("cpu") if self.backend == "gloo" else self.device

    def _sendable(self, values: Tensor) -> Tensor:
        """The same tensor if it is there already."""
        return values.to(self._sending_device)

    def min_over_ranks(self, number: int) -> int:
        """The smallest of what the ranks have: of cache capacity, say."""
        if self.world == 1:
            return number
        part = torch.tensor([number]).view(torch.uint8)
        return int(self.gather(part).view(torch.int64).min())

    def max_over_ranks(self, number: float) -> float:
        """The largest of what the ranks have: of times, say."""
        if self.world == 1:
            return number
        part = torch.tensor([number], dtype=torch.float64).view(torch.uint8)
        return float(self.gather(part).view(torch.float64).max())

    def broadcast_object(self, thing: Any) -> Any:
        """What rank 0 has, on every rank."""
        if self.world == 1:
            return thing
        things = [thing]
        with _as_rank_error():
            dist.broadcast_object_list(things, 0, device=self._sending_device)
        return things[0]


def make_store(host: str, port: int, **options: Any) -> Any:
    """A store where ranks find each other: made with `is_master`, on any free port if it is 0."""
    return dist.TCPStore(host, port, wait_for_workers=False, **options)  # type: ignore[attr-defined]


def check_degrees(world: int, branch_parallel: int, tensor_parallel: int) -> None:
    if min(branch_parallel, tensor_parallel) < 1 or branch_parallel * tensor_parallel != world:
        raise ConfigError(
            f"branch-parallel {branch_parallel} × tensor-parallel {tensor_parallel} does not make "
            f"{world} ranks"
        )


def backend_for(device: torch.device, ranks_here: int) -> str:
    """The device's own backend; gloo where ranks have to share a device, or have none."""
    if device.type == "cuda" and ranks_here > torch.cuda.device_count():
        return "gloo"
    return BACKENDS.get(device.type, "gloo")


# torch 2.13 renames the function and warns of the old name.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


@contextmanager
def _as_rank_error() -> Iterator[None]:
    """A collective fails when a rank is gone or late: say so, in one line."""
    try:
        yield
    except RuntimeError as error:
        # gloo says where in its source it is and wishes good luck: neither helps.
        reason = re.sub(r"^\[[^]]*\] *", "", str(error).strip()).split(". ")[0].split("\n")[0]
        raise RankError(f"another rank is gone or too slow ({reason})") from error
