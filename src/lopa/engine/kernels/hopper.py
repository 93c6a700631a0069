"""What the kernels in CUDA for Hopper have in common: where they run, how they are compiled."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import cache
from importlib.resources import files
from typing import Protocol

import torch

from lopa.engine import cuda


@cache
def available(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability(device) == cuda.CAPABILITY and bool(cuda.compiler())


@cache
def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def compiled(name: str, sizes: Mapping[str, int], mma: str) -> cuda.Binary:
    """`name` lies beside this file; `mma` is the function of that name, made for these sizes."""
    here = files("lopa.engine.kernels")
    source, common = (here.joinpath(n).read_text(encoding="utf-8") for n in (name, "hopper.h"))
    return cuda.compiled(name, source, sizes, {"hopper.h": common, "mma.h": mma})


class Plan(Protocol):
    """What a kernel is launched with."""

    @property
    def threads(self) -> int: ...
    @property
    def launched(self) -> int: ...  # registers of a thread
    @property
    def shared(self) -> int: ...  # bytes of shared memory


def kernel(
    device: torch.device, name: str, binary: Callable[[], cuda.Binary], made: Plan, lost: str
) -> cuda.Kernel | None:
    """None where it cannot be made, which is told with what is `lost`: a round does without it."""
    try:
        found = cuda.Kernel(device, binary(), name, threads=made.threads, shared=made.shared)
        if found.registers < made.launched:  # it would ask for more than there are, and wait
            raise RuntimeError(f"{name}.cu has {found.registers} registers, not {made.launched}")
    except RuntimeError as error:
        warnings.warn(f"{lost}: {error}", stacklevel=2)
        return None
    return found
