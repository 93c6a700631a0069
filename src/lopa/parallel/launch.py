"""How ranks come to be: torchrun made them, or this process starts its own on one machine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lopa.engine.device import choose_device
from lopa.errors import DeviceError
from lopa.parallel.channel import die_with
from lopa.parallel.environment import Launched
from lopa.parallel.mesh import Mesh, backend_for, meeting_place

_LISTENING = "LOPA_LISTENING"  # rank 0's inherited socket, on which the ranks meet
_PARENT = "LOPA_PARENT"  # whose end is the ranks' end


@dataclass(frozen=True, slots=True)
class Place:
    """Where one rank runs."""

    device: str
    threads: int = 0  # 0: torch's own choice
    cores: tuple[int, ...] = ()  # empty: any


def places(device: str, ranks: int, pin: bool = False) -> list[Place]:
    """A place for each rank of this machine: a device each, or a share of the cores."""
    kind = choose_device(device)
    if kind.type == "cpu":
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        each = max(1, (len(cores) or os.cpu_count() or 1) // ranks)
        pin = pin and ranks <= len(cores)
        return [
            Place("cpu", each, tuple(cores[i * each : (i + 1) * each]) if pin else ())
            for i in range(ranks)
        ]
    if ":" in device and ranks > 1:
        raise DeviceError(f"{ranks} ranks cannot be on {device}: give --device {kind.type}")
    if ranks == 1:
        return [Place(str(kind))]
    count = torch.accelerator.device_count()
    return [Place(f"{kind.type}:{i % count}") for i in range(ranks)]


def settle(place: Place) -> torch.device:
    """Make this process one that runs there."""
    if place.threads:
        torch.set_num_threads(place.threads)
    if place.cores:
        os.sched_setaffinity(0, place.cores)
    device = choose_device(place.device)
    if device.type not in ("cpu", "mps"):
        torch.accelerator.set_device_index(device.index or 0)
    return device


def join(
    launch: Launched,
    *,
    branch_parallel: int | None,
    tensor_parallel: int,
    device: str,
    timeout: float,
) -> Mesh:
    """Meet the ranks of this launch, on this rank's own device."""
    own = _PARENT in os.environ  # started by `run_ranks`
    if own:
        die_with(int(os.environ[_PARENT]))
    here = settle(places(device, launch.local_world, pin=own)[launch.local_rank])
    return Mesh.join(
        launch.rank,
        launch.world,
        branches=branch_parallel or launch.world // tensor_parallel,
        tensors=tensor_parallel,
        device=here,
        backend=backend_for(here, launch.local_world),
        timeout=timeout,
        store=_met(launch.rank) if own else None,  # None: the launcher's own
    )


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
                _PARENT: str(os.getpid()),
                _LISTENING: str(listening.fileno() if rank == 0 else -1),
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
                process.send_signal(signal.SIGKILL)
            process.wait()


def loopback() -> str:
    """The name of the interface that reaches this machine alone."""
    names = {name for _, name in socket.if_nameindex()}
    return next((name for name in ("lo", "lo0") if name in names), "")


def _met(rank: int) -> Any:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback())
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if rank == 0:
        return meeting_place(
            host, port, is_master=True, master_listen_fd=int(os.environ[_LISTENING])
        )
    return meeting_place(host, port, is_master=False)
