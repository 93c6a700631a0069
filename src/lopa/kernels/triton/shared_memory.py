"""Shared memory of a multiprocessor, and how many pipeline stages fit it."""

from __future__ import annotations

from functools import cache

import torch


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes that a program may use, less what Triton reserves."""
    if device.type != "cuda":  # Triton's interpreter
        return 1 << 20
    found: int = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    return found - 1024


def stages_that_fit(wanted: int, stage: int, memory: int) -> int:
    """At most `wanted`, of `stage` bytes each; at least one."""
    return max(1, min(wanted, memory // stage))
