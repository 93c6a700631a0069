"""Shared memory of a multiprocessor, and how many stages of a loop's data it holds."""

from __future__ import annotations

from functools import cache

import torch


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes that a program may have, less what Triton keeps for itself."""
    if device.type != "cuda":  # Triton's interpreter
        return 1 << 20
    found: int = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    return found - 1024


def stages_that_fit(wanted: int, stage: int, room: int) -> int:
    """At most so many, of so many bytes each; one at least."""
    return max(1, min(wanted, room // stage))
