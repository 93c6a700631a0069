"""What the tests of CUDA kernels share: there is a compiler here, and no device."""

from __future__ import annotations

import re
from importlib.resources import files
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lopa.kernels.hopper import common as hopper
from lopa.kernels.hopper import nvrtc
from lopa.kernels.hopper.nvrtc import TensorMap


def check_compiled(binary: nvrtc.Binary, threads: int) -> None:
    """Nothing is spilled, and it has the registers that setmaxnreg moves between threads."""
    code, log = binary
    assert code.startswith(b"\x7fELF")
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in log
    assert "Performance Loss" not in log  # of wgmma that is serialized
    assert "warning" not in log
    # Else setmaxnreg would wait forever for registers that the block does not have.
    assert f"Used {hopper.registers_per_thread(threads)} registers" in log


class Launches:
    """In place of a kernel: checks that its arguments are those of its CUDA source."""

    def __init__(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        source = files("lopa.kernels.hopper").joinpath(f"{name}.cu").read_text(encoding="utf-8")
        found = re.search(rf"__global__ [^{{]*?\b{name}\((.*?)\) {{", source, re.DOTALL)
        assert found is not None
        self.signature = [
            TensorMap if " Map " in declared else Tensor if "*" in declared else int
            for declared in found[1].split(",")
        ]
        self.count = 0
        monkeypatch.setattr(nvrtc, "driver", SimpleNamespace)
        monkeypatch.setattr(nvrtc, "call", lambda *given: None)

    def launch(self, grid: tuple[int, ...], *arguments: Any) -> None:
        for argument, kind in zip(arguments, self.signature, strict=True):
            assert isinstance(argument, kind)
        self.count += 1


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
