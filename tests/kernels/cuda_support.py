"""What the tests of kernels in CUDA have in common: there is a compiler here, and no device."""

from __future__ import annotations

import torch
from torch import Tensor

from lopa.kernels.hopper import common as hopper
from lopa.kernels.hopper import nvrtc as cuda


def check_compiled(binary: cuda.Binary, threads: int) -> None:
    """Nothing is lost, and it has the registers that its threads hand to one another."""
    code, log = binary
    assert code.startswith(b"\x7fELF")
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in log
    assert "Performance Loss" not in log  # as where products are made one after the other
    assert "warning" not in log
    # Else threads would wait for ever for registers that the block does not have.
    assert f"Used {hopper.registers(threads)} registers" in log


def bf16(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")
