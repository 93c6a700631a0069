"""Products of many tokens on Hopper, plain or with SwiGLU in the epilogue: `swiglu_gemm.cu`.

Gated is the first half of a feed-forward in one kernel, silu(x · gateᵀ) · (x · upᵀ). It is used
where its tiles keep the device busy. The plain product is used for the head with several hundred
positions. Elsewhere cuBLASLt is as fast or faster (measurements/kernels.md).
"""

from __future__ import annotations

from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from lopa.kernels import compilation
from lopa.kernels.hopper import common as hopper
from lopa.kernels.hopper import nvrtc
from lopa.kernels.hopper.common import ALIGNMENT, CHUNK, EIGHT, GROUP, STAGES_BYTES, arrange_rows

PAIR = 2  # blocks of a cluster, which share the weights of two tiles of tokens
_WORKERS = 3  # warpgroups that multiply, each 64 rows of the weight
ROWS = 64 * _WORKERS  # of the weight, per tile
_THREADS = 128 * (1 + _WORKERS)
_PRODUCER_REGISTERS = 32  # of a thread that copies; one that multiplies gets what is left
_ALL_REGISTERS = hopper.registers_per_thread(_THREADS) * (1 + _WORKERS)  # of four threads
_CONSUMER_REGISTERS = (_ALL_REGISTERS - _PRODUCER_REGISTERS) // _WORKERS // 8 * 8
_MOST_TOKENS = 256  # of a tile
_MOST_AT_ONCE = 192  # of a wgmma: the compiler has no registers for the sums of more
_LEAST_TOKENS = {True: 192, False: 337}  # of a batch, gated or not
_MOST_STAGES = 6


class GemmTiling(NamedTuple):
    """How a product is split into tiles, and tiles over blocks."""

    tokens: int  # of a tile
    gated: bool

    @property
    def parts(self) -> int:
        """Of a tile's tokens, one wgmma each."""
        return -(-self.tokens // _MOST_AT_ONCE)

    @property
    def stages(self) -> int:
        return min(_MOST_STAGES, STAGES_BYTES // self._stage)

    @property
    def shared(self) -> int:
        """Bytes of shared memory."""
        return self.stages * self._stage + ALIGNMENT

    @property
    def _stage(self) -> int:
        return (self.tokens + ROWS) * CHUNK * 2

    def units(self, tokens: int, rows: int) -> int:
        """Pairs of tiles."""
        return -(-tokens // (PAIR * self.tokens)) * -(-rows // ROWS)

    def blocks(self, tokens: int, rows: int, sms: int) -> int:
        """One per multiprocessor, in whole pairs, and none without a tile."""
        return PAIR * min(self.units(tokens, rows), sms // PAIR)

    def time(self, tokens: int, rows: int, sms: int) -> int:
        """Of the busiest block, in sums."""
        pairs = self.blocks(tokens, rows, sms) // PAIR
        return -(-self.units(tokens, rows) // pairs) * self.tokens * ROWS


def choose_tiling(
    tokens: int, rows: int, inner: int, sms: int, *, gated: bool
) -> GemmTiling | None:
    """For a weight [rows, inner]; None where cuBLASLt is faster."""
    if tokens < _LEAST_TOKENS[gated] or not rows or rows % GROUP or sms < PAIR:
        return None
    tiles = PAIR * -(-tokens // (PAIR * _MOST_TOKENS))
    tiling = GemmTiling(-(-tokens // (tiles * 2 * EIGHT)) * 2 * EIGHT, gated)
    if inner % CHUNK or inner < tiling.stages * CHUNK:
        return None
    if (tiles - 1) * tiling.tokens >= tokens:  # the last tile would be all padding
        return None
    # At least nine tenths of the device's time are spent on sums that are wanted.
    is_idle = 10 * tokens * rows < 9 * tiling.time(tokens, rows, sms) * sms
    return None if is_idle else tiling


def supports(x: Tensor, weight: Tensor, *, gated: bool) -> bool:
    """Whether `swiglu_gemm` runs here and is faster than cuBLASLt."""
    return (
        hopper.available(x.device)
        and x.dtype is weight.dtype is torch.bfloat16
        and x.is_contiguous()
        and weight.is_contiguous()
        and (tiling := _tiling_of(x, weight, gated)) is not None
        and _known_kernel(x.device, tiling) is not None
    )


def swiglu_gemm(x: Tensor, weight: Tensor, *, gated: bool) -> Tensor:
    """x [tokens, inner], weight [rows, inner] → [tokens, rows]; gated: → [tokens, rows / 2]

    If gated, the weight is gate above up. The kernel reads the weight before the kernel in front
    of it has ended.
    """
    tiling = _tiling_of(x, weight, gated)
    kernel = tiling and _known_kernel(x.device, tiling)
    if tiling is None or kernel is None:
        raise ValueError(f"no kernel for {list(x.shape)} by {list(weight.shape)}")
    (tokens, inner), rows = x.shape, len(weight)
    columns = rows // 2 if gated else rows
    out = x.new_empty(tokens, columns)
    x_map = nvrtc.TensorMap(x, (tiling.tokens, CHUNK))
    half = ROWS // PAIR // GROUP, 2, EIGHT, CHUNK  # fetched by each block of a pair
    weight_map = nvrtc.TensorMap(arrange_rows(weight, gated=gated), half)
    blocks = tiling.blocks(tokens, rows, hopper.sm_count(x.device))
    kernel.launch((blocks,), x_map, weight_map, out, tokens, columns, inner)
    return out


def binary(tiling: GemmTiling) -> nvrtc.Binary:
    sizes = {
        "TOKENS": tiling.tokens,
        "PARTS": tiling.parts,
        "WORKERS": _WORKERS,
        "GATED": int(tiling.gated),
        "CHUNK": CHUNK,
        "STAGES": tiling.stages,
        "THREADS": _THREADS,
        "PRODUCER_REGISTERS": _PRODUCER_REGISTERS,
        "CONSUMER_REGISTERS": _CONSUMER_REGISTERS,
    }
    mma = hopper.mma_source(tiling.tokens // tiling.parts, in_registers=False)
    return hopper.compile_source("swiglu_gemm.cu", sizes, mma)


def _tiling_of(x: Tensor, weight: Tensor, gated: bool) -> GemmTiling | None:
    tokens, inner = x.shape
    return choose_tiling(tokens, len(weight), inner, hopper.sm_count(x.device), gated=gated)


def _known_kernel(
    device: torch.device, tiling: GemmTiling
) -> nvrtc.Kernel | hopper.Unlaunched | None:
    load = partial(_kernel, device, tiling)
    is_noted = compilation.note("swiglu_gemm", (device, tiling), hopper.SOURCE_SIZE, load)
    return hopper.Unlaunched() if is_noted else load()


@cache
def _kernel(device: torch.device, tiling: GemmTiling) -> nvrtc.Kernel | None:
    fallback = "matrix products go by cuBLASLt, a little slower"
    sizes = {"threads": _THREADS, "shared": tiling.shared}
    return hopper.load_kernel(
        device, "swiglu_gemm", lambda: binary(tiling), **sizes, fallback=fallback
    )
