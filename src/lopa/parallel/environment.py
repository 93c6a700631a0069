"""What a launcher such as torchrun says about this process. Light: the command line asks first."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Launched:
    rank: int
    world: int
    local_rank: int
    local_world: int


def launched() -> Launched | None:
    """None where this is no rank of several."""
    try:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
        local_world = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    except (KeyError, ValueError):
        return None
    if world < 2 or "MASTER_ADDR" not in os.environ:
        return None
    return Launched(rank, world, local_rank, local_world)


def speaks() -> bool:
    """Whether this process may write for all: rank 0, or the only one there is."""
    launch = launched()
    return launch is None or launch.rank == 0
