"""What the tests of CUDA kernels share: there is a compiler here, and no device."""

from __future__ import annotations

import torch
from torch import Tensor

from lopa.kernels.hopper import common as hopper
from lopa.kernels.hopper import nvrtc


def check_compiled(binary: nvrtc.Binary, threads: int) -> None:
    """Nothing is spilled, and it has the registers that setmaxnreg moves between threads."""
    code, log = binary
    assert code.startswith(b"\x7fELF")
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in log
    assert "Performance Loss" not in log  # of wgmma that is serialized
    assert "warning" not in log
    # Else setmaxnreg would wait forever for registers that the block does not have.
    assert f"Used {hopper.registers_per_thread(threads)} registers" in log


def bf16(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")
