"""The first half of a feed-forward on Hopper, silu(x · gateᵀ) · (x · upᵀ), as one kernel in CUDA.

`gated.cu` is the kernel. It pays where its tiles fill the device, few of their rows are padding and
at least two of them have the same columns (benchmarks/engine.md); elsewhere the library's product
and `pointwise.activate` are as good or better.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from lopa.engine import cuda
from lopa.engine.kernels import hopper

TOKENS = 128  # of a tile
PAIR = 2  # blocks, which share what they both need
CHUNK = 64  # of the inner axis, that a stage holds
STAGES = 4
_THREADS = 384
_COLUMNS = (144, 128, 96)  # of a tile: what has been checked on a GPU
_ALIGNMENT = 1024  # bytes, of the stages


class Plan(NamedTuple):
    """How a result of [tokens, columns] is cut into tiles, and who makes them."""

    columns: int  # of a tile
    share: int  # by a pair, 1: weights, of two tiles of tokens; 2: x, of two tiles of columns

    @property
    def shared(self) -> int:
        """Bytes of shared memory."""
        return STAGES * (TOKENS + 2 * self.columns) * CHUNK * 2 + _ALIGNMENT

    def tiles(self, tokens: int, columns: int) -> int:
        return -(-tokens // TOKENS) * -(-columns // self.columns)

    def blocks(self, tokens: int, columns: int, processors: int) -> int:
        """One a processor, in whole pairs, and none without a tile."""
        return min(self.tiles(tokens, columns), processors // PAIR * PAIR)

    def waves(self, tokens: int, columns: int, processors: int) -> int:
        return -(-self.tiles(tokens, columns) // self.blocks(tokens, columns, processors))


def plan(tokens: int, columns: int, inner: int, processors: int) -> Plan | None:
    """None where the library is better."""
    rows = -(-tokens // TOKENS)  # of tiles
    if rows < 2 or columns % 16 or inner % CHUNK or inner < STAGES * CHUNK:
        return None
    if 8 * tokens < 7 * rows * TOKENS:  # more than an eighth is padding
        return None
    # No tile is left without another that it shares with.
    plans = [
        Plan(width, 2 if rows % 2 else 1)
        for width in _COLUMNS
        if not rows % 2 or not -(-columns // width) % 2
    ]

    def time(one: Plan) -> int:
        return one.waves(tokens, columns, processors) * one.columns

    best = min(plans, key=time, default=None)
    if best is None or 10 * columns * rows < 9 * time(best) * processors:
        return None
    return best


def suits(x: Tensor, weight: Tensor) -> bool:
    """Whether `gated` takes them, and is worth it."""
    return (
        hopper.available(x.device)
        and x.dtype is weight.dtype is torch.bfloat16
        and x.is_contiguous()
        and weight.is_contiguous()
        and (made := _plan_of(x, weight)) is not None
        and _kernel(x.device, made) is not None
    )


def gated(x: Tensor, weight: Tensor) -> Tensor:
    """x [tokens, inner], weight [2 · columns, inner], gate before up → [tokens, columns].

    The weight is read while the kernel before this one is at work, which must not write it.
    """
    made = _plan_of(x, weight)
    kernel = made and _kernel(x.device, made)
    if made is None or kernel is None:
        raise ValueError(f"no kernel for {list(x.shape)} by {list(weight.shape)}")
    (tokens, inner), columns = x.shape, len(weight) // 2
    out = x.new_empty(tokens, columns)
    x_map = cuda.TensorMap(x, (TOKENS // 2 if made.share == 2 else TOKENS, CHUNK))
    weight_map = cuda.TensorMap(turned(weight), (made.columns // 16, 2, 4, 2, CHUNK))
    blocks = made.blocks(tokens, columns, hopper.processors(x.device))
    kernel.launch((blocks,), x_map, weight_map, out, tokens, columns, inner)
    return out


def turned(weight: Tensor) -> Tensor:
    """[rows, inner] → [rows / 16, 2, 4, 2, inner]: row 4q + 2j + e of sixteen comes as 8j + 2q + e.

    A thread has columns 2q and 2q + 1 of every eight: so four that lie together in the result.
    """
    return weight.unflatten(0, (-1, 4, 2, 2)).transpose(1, 2)


def binary(made: Plan) -> cuda.Binary:
    sizes = {
        "TOKENS": TOKENS,
        "COLUMNS": made.columns,
        "CHUNK": CHUNK,
        "STAGES": STAGES,
        "THREADS": _THREADS,
        "SHARE": made.share,
    }
    return hopper.compiled("gated.cu", sizes, _mma(made.columns))


def _mma(columns: int) -> str:
    """One wgmma of 64 tokens, so many columns and 16 of the inner axis, both from shared memory."""
    sums = columns // 2
    registers = ", ".join(f"%{i}" for i in range(sums))
    operands = ", ".join(f'"+f"(sums[{i}])' for i in range(sums))
    return f"""
__device__ __forceinline__ void mma(
    float (&sums)[{sums}], unsigned long long x, unsigned long long weight, int add) {{
  asm volatile(
      "{{\\n.reg .pred p;\\n"
      "setp.ne.b32 p, %{sums + 2}, 0;\\n"  // else the sums begin from zero
      "wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.bf16.bf16 "
      "{{{registers}}}, %{sums}, %{sums + 1}, p, 1, 1, 0, 0;\\n}}"
      : {operands}
      : "l"(x), "l"(weight), "r"(add));
}}
"""


def _plan_of(x: Tensor, weight: Tensor) -> Plan | None:
    tokens, inner = x.shape
    return plan(tokens, len(weight) // 2, inner, hopper.processors(x.device))


@cache
def _kernel(device: torch.device, made: Plan) -> cuda.Kernel | None:
    """None where it cannot be made, which is told: a round does without it."""
    try:
        return cuda.Kernel(device, binary(made), "gated", threads=_THREADS, shared=made.shared)
    except RuntimeError as error:
        warnings.warn(f"gate and up go by the library, a little slower: {error}", stacklevel=2)
        return None
