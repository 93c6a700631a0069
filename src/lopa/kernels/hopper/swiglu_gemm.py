"""Products of many tokens on Hopper as a kernel in CUDA, `paired.cu`: plain, or gated.

Gated is the first half of a feed-forward, silu(x · gateᵀ) · (x · upᵀ), in one go. It pays where its
tiles keep the device busy, and the plain one for the head of several hundred positions alone
(measurements/kernels.md); elsewhere the library's products are as good or better.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from lopa.kernels.hopper import common as hopper
from lopa.kernels.hopper import nvrtc as cuda
from lopa.kernels.hopper.common import ALIGNMENT, CHUNK, EIGHT, GROUP, STAGES_BYTES, arranged

PAIR = 2  # blocks, which share the weights of two tiles of tokens
_WORKERS = 3  # groups of four warps that multiply, each 64 rows of the weight
ROWS = 64 * _WORKERS  # of the weight, of a tile
_THREADS = 128 * (1 + _WORKERS)
_COPYING = 32  # registers of a thread that does; one that multiplies has what is left, by eights
_MULTIPLYING = (hopper.registers(_THREADS) * (1 + _WORKERS) - _COPYING) // _WORKERS // 8 * 8
_MOST_TOKENS = 256  # of a tile
_MOST_AT_ONCE = 192  # of a wgmma: the compiler has no registers for the sums of more
_LEAST_TOKENS = {True: 192, False: 337}  # of a batch, gated or not
_MOST_STAGES = 6


class Plan(NamedTuple):
    """How a product is cut into tiles, and who makes them."""

    tokens: int  # of a tile
    gated: bool

    @property
    def parts(self) -> int:
        """Of a tile's tokens, each for a wgmma of its own."""
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
        """Tiles, two at a time."""
        return -(-tokens // (PAIR * self.tokens)) * -(-rows // ROWS)

    def blocks(self, tokens: int, rows: int, processors: int) -> int:
        """One a processor, in whole pairs, and none without a tile."""
        return PAIR * min(self.units(tokens, rows), processors // PAIR)

    def time(self, tokens: int, rows: int, processors: int) -> int:
        """Of the busiest block, in sums."""
        pairs = self.blocks(tokens, rows, processors) // PAIR
        return -(-self.units(tokens, rows) // pairs) * self.tokens * ROWS


def plan(tokens: int, rows: int, inner: int, processors: int, *, gated: bool) -> Plan | None:
    """For a weight [rows, inner]; None where the library is better."""
    if tokens < _LEAST_TOKENS[gated] or not rows or rows % GROUP or processors < PAIR:
        return None
    tiles = PAIR * -(-tokens // (PAIR * _MOST_TOKENS))
    made = Plan(-(-tokens // (tiles * 2 * EIGHT)) * 2 * EIGHT, gated)
    if inner % CHUNK or inner < made.stages * CHUNK:
        return None
    if (tiles - 1) * made.tokens >= tokens:  # the last one would be nothing but padding
        return None
    is_idle = 10 * tokens * rows < 9 * made.time(tokens, rows, processors) * processors  # a tenth
    return None if is_idle else made


def suits(x: Tensor, weight: Tensor, *, gated: bool) -> bool:
    """Whether `paired` takes them, and is worth it."""
    return (
        hopper.available(x.device)
        and x.dtype is weight.dtype is torch.bfloat16
        and x.is_contiguous()
        and weight.is_contiguous()
        and (made := _plan_of(x, weight, gated)) is not None
        and _kernel(x.device, made) is not None
    )


def paired(x: Tensor, weight: Tensor, *, gated: bool) -> Tensor:
    """x [tokens, inner], weight [rows, inner] → [tokens, rows]; gate before up → [tokens, rows / 2]

    The weight is read while the kernel before this one is at work, which must not write it.
    """
    made = _plan_of(x, weight, gated)
    kernel = made and _kernel(x.device, made)
    if made is None or kernel is None:
        raise ValueError(f"no kernel for {list(x.shape)} by {list(weight.shape)}")
    (tokens, inner), rows = x.shape, len(weight)
    columns = rows // 2 if gated else rows
    out = x.new_empty(tokens, columns)
    x_map = cuda.TensorMap(x, (made.tokens, CHUNK))
    half = ROWS // PAIR // GROUP, 2, EIGHT, CHUNK  # that either of a pair fetches
    weight_map = cuda.TensorMap(arranged(weight, gated=gated), half)
    blocks = made.blocks(tokens, rows, hopper.processors(x.device))
    kernel.launch((blocks,), x_map, weight_map, out, tokens, columns, inner)
    return out


def binary(made: Plan) -> cuda.Binary:
    sizes = {
        "TOKENS": made.tokens,
        "PARTS": made.parts,
        "WORKERS": _WORKERS,
        "GATED": int(made.gated),
        "CHUNK": CHUNK,
        "STAGES": made.stages,
        "THREADS": _THREADS,
        "COPYING": _COPYING,
        "MULTIPLYING": _MULTIPLYING,
    }
    mma = hopper.mma(made.tokens // made.parts, in_registers=False)
    return hopper.compiled("swiglu_gemm.cu", sizes, mma)


def _plan_of(x: Tensor, weight: Tensor, gated: bool) -> Plan | None:
    tokens, inner = x.shape
    return plan(tokens, len(weight), inner, hopper.processors(x.device), gated=gated)


@cache
def _kernel(device: torch.device, made: Plan) -> cuda.Kernel | None:
    lost = "products go by the library, a little slower"
    sizes = {"threads": _THREADS, "shared": made.shared}
    return hopper.kernel(device, "paired", lambda: binary(made), **sizes, lost=lost)
