"""What the kernels in CUDA for Hopper have in common: where they run, how they are compiled."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files

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
