"""Where a rank runs, and how it meets the others."""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass
from typing import Any

import torch

from lopa.distributed.channel import die_with
from lopa.distributed.launch import LISTENING, PARENT, LaunchInfo
from lopa.distributed.mesh import Mesh, backend_for, make_store
from lopa.errors import DeviceError
from lopa.runner.device import choose_device


@dataclass(frozen=True, slots=True)
class DevicePlacement:
    """Where one rank runs."""

    device: str
    threads: int = 0  # 0: torch's own choice
    cores: tuple[int, ...] = ()  # empty: any


def placements(device: str, ranks: int, pin: bool = False) -> list[DevicePlacement]:
    """A place for each rank of this machine: a device each, or a share of the cores."""
    kind = choose_device(device)
    if kind.type == "cpu":
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        each = max(1, min((len(cores) or os.cpu_count() or 1) // ranks, _most_threads()))
        pin = pin and ranks <= len(cores)
        return [
            DevicePlacement("cpu", each, tuple(cores[i * each : (i + 1) * each]) if pin else ())
            for i in range(ranks)
        ]
    if ":" in device and ranks > 1:
        raise DeviceError(f"{ranks} ranks cannot be on {device}: give --device {kind.type}")
    if ranks == 1:
        return [DevicePlacement(str(kind))]
    count = torch.accelerator.device_count()
    return [DevicePlacement(f"{kind.type}:{i % count}") for i in range(ranks)]


def _most_threads() -> int:
    """What OMP_NUM_THREADS allows a process."""
    given = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    return int(given) if given.isdigit() else sys.maxsize


def pin_process(placement: DevicePlacement) -> torch.device:
    """Make this process one that runs there."""
    if placement.threads:
        torch.set_num_threads(placement.threads)
    if placement.cores:
        os.sched_setaffinity(0, placement.cores)
    device = choose_device(placement.device)
    if device.type not in ("cpu", "mps"):
        torch.accelerator.set_device_index(device.index or 0)
    return device


def join(
    launch: LaunchInfo,
    *,
    branch_parallel: int | None,
    tensor_parallel: int,
    device: str,
    timeout: float,
) -> Mesh:
    """Meet the ranks of this launch, on this rank's own device."""
    own = PARENT in os.environ  # started by `run_ranks`
    if own:
        die_with(int(os.environ[PARENT]))
    here = pin_process(placements(device, launch.local_world, pin=own)[launch.local_rank])
    return Mesh.join(
        launch.rank,
        launch.world,
        branch_parallel=branch_parallel or launch.world // tensor_parallel,
        tensor_parallel=tensor_parallel,
        device=here,
        backend=backend_for(here, launch.local_world),
        timeout=timeout,
        store=_store(launch.rank) if own else None,  # None: the launcher's own
    )


def use_loopback() -> None:
    """Have gloo use the interface that reaches this machine alone, unless told otherwise."""
    names = {name for _, name in socket.if_nameindex()}
    for name in ("lo", "lo0"):
        if name in names:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def _store(rank: int) -> Any:
    use_loopback()
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if rank == 0:
        return make_store(host, port, is_master=True, master_listen_fd=int(os.environ[LISTENING]))
    return make_store(host, port, is_master=False)
