"""What the tests of CUDA kernels share: there is a compiler here, and no device."""

from __future__ import annotations

import torch
import torch.nn.functional as F
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


COMPRESSED_FACTOR = 2  # by which the results of a fake differ


class FakeCompressed:
    """In place of a compressed weight."""

    def __init__(self, weight: Tensor, gated: bool) -> None:
        self.weight, self.gated = weight, gated

    def supports(self, x: Tensor) -> bool:
        return len(x) <= 64

    def __call__(self, x: Tensor) -> Tensor:
        assert self.supports(x)
        out = F.linear(x, self.weight)
        if not self.gated:
            return COMPRESSED_FACTOR * out
        gate, up = out.chunk(2, dim=1)
        return COMPRESSED_FACTOR * F.silu(gate) * up
