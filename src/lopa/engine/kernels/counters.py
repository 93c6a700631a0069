"""Counters: where programs that share a tile find out which of them is the last to come.

All zero before a kernel and after it. Kernels follow one another on a device, so they share them.
"""

from __future__ import annotations

import torch
from torch import Tensor

MOST = 1 << 14

_counters: dict[torch.device, Tensor] = {}


def counters(device: torch.device) -> Tensor:
    """[MOST] int32. Graphs keep their address: they stay."""
    if device not in _counters:
        _counters[device] = torch.zeros(MOST, dtype=torch.int32, device=device)
    return _counters[device]
