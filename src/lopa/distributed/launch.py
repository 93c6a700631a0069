"""How ranks come to be: a launcher such as torchrun made them, or `run_ranks` does.

Light: the command line asks here before it imports torch.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

LISTENING = "LOPA_LISTENING"  # rank 0's inherited socket, on which the ranks meet
PARENT = "LOPA_PARENT"  # whose end is the ranks' end


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
    if "MASTER_ADDR" not in os.environ or (world < 2 and PARENT not in os.environ):
        return None
    return Launched(rank, world, local_rank, local_world)


def speaks() -> bool:
    """Whether this process may write for all: rank 0, or the only one there is."""
    launch = launched()
    return launch is None or launch.rank == 0


def run_ranks(ranks: int, arguments: Sequence[str]) -> int:
    """Run `lopa` with these arguments as the ranks of a group; the first bad exit code, or 0.

    Rank 0 speaks for all. When one fails the others are ended.
    """
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen()
    host, port = listening.getsockname()
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(ranks):
            environment = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": host,
                "MASTER_PORT": str(port),
                PARENT: str(os.getpid()),
                LISTENING: str(listening.fileno() if rank == 0 else -1),
            }
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "lopa", *arguments],
                    env=environment,
                    pass_fds=[listening.fileno()] if rank == 0 else [],
                    stdin=None if rank == 0 else subprocess.DEVNULL,
                )
            )
        listening.close()
        while True:
            codes = [process.poll() for process in processes]
            bad = [code for code in codes if code]
            if bad or None not in codes:
                return abs(bad[0]) if bad else 0
            time.sleep(0.02)
    finally:
        listening.close()
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
