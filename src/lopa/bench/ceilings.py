"""What this device can do: bytes and operations per second, measured, and the floor they set."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from lopa.bench.round_work import RoundWork


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Measured, not from a datasheet."""

    bytes_per_second: float  # a large copy, bytes read and written
    flops_per_second: float  # a large matrix product in the model's dtype
    quantised_flops_per_second: float | None = None  # and in the linear layers' own

    def floor(self, work: RoundWork) -> float:
        """Least seconds of a forward."""
        done = work.flops / self.flops_per_second
        if self.quantised_flops_per_second is not None:
            done += work.quantised_flops / self.quantised_flops_per_second
        return max(work.bytes / self.bytes_per_second, done)


def measure(device: torch.device, dtype: torch.dtype, quantize: torch.dtype | None) -> Ceilings:
    """A second or two on any device."""
    large = device.type != "cpu"
    count = 2**30 if large else 2**25
    source = torch.empty(count, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    copied = 2 * count / median_seconds(lambda: target.copy_(source), device)
    side = 8192 if large else 768
    a = torch.randn(side, side, device=device).to(dtype)
    b = torch.randn(side, side, device=device).to(dtype)
    plain = 2 * side**3 / median_seconds(lambda: a @ b, device)
    if quantize is None:
        return Ceilings(copied, plain)
    from lopa.kernels.quantize import QuantizedLinear
    from lopa.kernels.scaled import quantize_rows

    linear = torch.nn.Linear(side, side, bias=False, device=device, dtype=dtype)
    product, given = QuantizedLinear(linear, quantize), quantize_rows(a, quantize)
    return Ceilings(copied, plain, 2 * side**3 / median_seconds(lambda: product(given), device))


def median_seconds(work: Callable[[], object], device: torch.device, repeats: int = 7) -> float:
    """After two runs to warm up; each run is waited for."""
    times = []
    for index in range(repeats + 2):
        synchronize(device)
        began = time.perf_counter()
        work()
        synchronize(device)
        if index >= 2:
            times.append(time.perf_counter() - began)
    return statistics.median(times)


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
