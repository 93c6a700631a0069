"""Ranks of a launcher such as torchrun, or of `run_ranks`.

Imports nothing heavy: the command line needs it before torch.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

LISTENING = "LOPA_LISTENING"  # rank 0's inherited socket, on which the ranks meet
PARENT = "LOPA_PARENT"  # process id: the ranks end with it
_SECONDS_TO_FAIL = 20.0  # ranks start unevenly: rank 0 may find the same error this much later


@dataclass(frozen=True, slots=True)
class LaunchInfo:
    """Who this rank is, from the launcher's environment variables."""

    rank: int
    world: int
    local_rank: int
    local_world: int


def launch_info() -> LaunchInfo | None:
    """None where this process is not one of several ranks."""
    try:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
        local_world = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    except (KeyError, ValueError):
        return None
    if "MASTER_ADDR" not in os.environ or (world < 2 and PARENT not in os.environ):
        return None
    return LaunchInfo(rank, world, local_rank, local_world)


def is_main_rank() -> bool:
    """Whether this process writes the output: rank 0, or the only process."""
    launch = launch_info()
    return launch is None or launch.rank == 0


def await_end_by_launcher() -> None:
    """Wait until rank 0 has failed with the same error, and the launcher ends the other ranks.

    If this rank exited first, the launcher would end rank 0 before it has printed the error.
    """
    with suppress(KeyboardInterrupt):
        time.sleep(_SECONDS_TO_FAIL)


def run_ranks(ranks: int, arguments: Sequence[str]) -> int:
    """Run `lopa` with these arguments as the ranks of a group; the first bad exit code, or 0.

    Rank 0 writes the output. When one fails the others are killed.
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
