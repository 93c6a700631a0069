"""bf16 weights losslessly compressed to 12¼ bits, and their products with few tokens on Hopper.

With so few tokens a product takes as long as reading the weight, so it takes three quarters of the
time. `compressed_gemm.cu` is the kernel; measurements/kernels.md has its gain.

The upper seven of the eight exponent bits are nearly the same for all weights. A record, 16 rows by
64 columns, stores their least value once, the base, and three bits per weight that are added to it.
Sign, lowest exponent bit and fraction are stored as they are. The few outliers that three bits do
not reach, about one weight in ten thousand, are stored in full.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from lopa.kernels import compilation
from lopa.kernels.hopper import common as hopper
from lopa.kernels.hopper import nvrtc
from lopa.kernels.hopper.common import ALIGNMENT, CHUNK, GROUP, STAGES_BYTES, arrange_rows

MAX_TOKENS = 64
MAX_OUTLIERS = 7  # of a record
RECORD = GROUP * CHUNK * 12 // 8 + 4 + 4 * MAX_OUTLIERS  # bytes
_REACH = 8  # values that three bits tell apart
_BASES = 6  # tried per record: the highest that reaches its largest weight, and lower ones
_MOST_GROUPS = 20  # of a unit: the sums of more do not fit the registers
_LEAST_GROUPS = 12  # of a unit: with 7, which read more of x, Dream's down was slower
_MOST_SPLITS = 8
_LEAST_BYTES = 64 << 20  # of a weight in bf16: below it cuBLASLt is as fast
_PRODUCER_REGISTERS = 40  # of a thread that copies
_AT_ONCE = 1 << 24  # weights encoded at once: the intermediate tensors are many times larger


class CompressedTiling(NamedTuple):
    """How a weight is split into units of groups, and units over blocks."""

    groups: int  # of a unit
    units: int
    split: int  # blocks per unit, each with a part of the inner axis
    gated: bool
    polls: int = 1 << 12  # how often a block checks whether the others of its unit are done

    @property
    def threads(self) -> int:
        return 128 * (1 + -(-self.groups // 4))

    @property
    def launch_registers(self) -> int:
        """Of a thread at launch."""
        return hopper.registers_per_thread(self.threads)

    @property
    def consumer_registers(self) -> int:
        """Of a thread that multiplies: what the copying ones leave, a multiple of 8."""
        left = self.launch_registers * self.threads - 128 * _PRODUCER_REGISTERS
        return min(232, left // (self.threads - 128) // 8 * 8)

    @property
    def stages(self) -> int:
        return STAGES_BYTES // self._stage

    @property
    def shared(self) -> int:
        """Bytes of shared memory."""
        return self.stages * self._stage + ALIGNMENT

    @property
    def _stage(self) -> int:
        return MAX_TOKENS * CHUNK * 2 + self.groups * RECORD

    @property
    def partial_bytes(self) -> int:
        """Of the partial sums that the blocks of a unit exchange."""
        if self.split == 1:
            return 0
        return self.units * self.split * self.groups * GROUP * MAX_TOKENS * 4

    def blocks(self, sms: int) -> int:
        return min(self.units, sms) * self.split


def choose_tiling(rows: int, inner: int, sms: int, *, gated: bool) -> CompressedTiling | None:
    """None where cuBLASLt is as fast."""
    if rows % (2 * GROUP) or inner % CHUNK or 2 * rows * inner < _LEAST_BYTES:
        return None
    groups, chunks = rows // GROUP, inner // CHUNK
    tilings = []
    for split in range(1, _MOST_SPLITS + 1):
        at_once = sms // split  # units
        if not at_once:
            break
        waves = -(-groups // (at_once * _MOST_GROUPS)) if split == 1 else 1
        size = -(-groups // (at_once * waves))
        one = CompressedTiling(size, -(-groups // size), split, gated)
        if _LEAST_GROUPS <= size <= _MOST_GROUPS and chunks // split >= one.stages:
            tilings.append(one)

    def time(one: CompressedTiling) -> int:
        """Of the busiest multiprocessor, in records."""
        waves = -(-one.units * one.split // sms)
        return waves * one.groups * -(-chunks // one.split)

    # The fewest splits within 2 % of the best: they have fewer partial sums to add.
    least = min(map(time, tilings), default=0)
    return next((one for one in tilings if 50 * time(one) <= 51 * least), None)


class CompressedWeight:
    """A weight [rows, inner] as records. If gated it is gate above up, and x gives SwiGLU.

    The weight must not change afterwards. Calls may not overlap: they share the counters.
    """

    def __init__(self, tiling: CompressedTiling, data: Tensor, columns: int, inner: int) -> None:
        self.tiling, self.data, self.columns, self.inner = tiling, data, columns, inner
        shape = tiling.units if tiling.split > 1 else 0, 1 + tiling.split
        self._arrived = torch.zeros(shape, dtype=torch.int32, device=data.device)

    def supports(self, x: Tensor) -> bool:
        return len(x) <= MAX_TOKENS and x.dtype is torch.bfloat16 and x.is_contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, inner] → [tokens, columns]

        The kernel reads the weight before the kernel in front of it has ended.
        """
        kernel = _kernel(x.device, self.tiling)  # `compress` has made sure of it
        if kernel is None or not self.supports(x):
            raise ValueError(f"no kernel for {list(x.shape)} in {x.dtype}")
        out = x.new_empty(len(x), self.columns)
        partial = torch.empty(self.tiling.partial_bytes, dtype=torch.uint8, device=x.device)
        kernel.launch(
            (self.tiling.blocks(hopper.sm_count(x.device)),),
            nvrtc.TensorMap(x, (MAX_TOKENS, CHUNK)),
            *(self.data, out, len(x), self.columns, self.inner, self.tiling.units),
            *(partial, self._arrived),
        )
        return out


def kernel_jobs(device: torch.device, tilings: Iterable[CompressedTiling]) -> compilation.Jobs:
    """What `compress` would otherwise compile one after the other."""
    name, size = "compressed_gemm", hopper.SOURCE_SIZE
    return {one: compilation.Job(name, size, partial(_kernel, device, one)) for one in tilings}


def compress(weight: Tensor, *, gated: bool) -> CompressedWeight | None:
    """[rows, inner] in bf16; None where it has too many outliers or cuBLASLt is as fast."""
    tiling = tiling_of(weight, gated=gated)
    if tiling is None or _kernel(weight.device, tiling) is None:
        return None
    rows, inner = weight.shape
    data = encode(weight, tiling)
    columns = rows // 2 if gated else rows
    return None if data is None else CompressedWeight(tiling, data, columns, inner)


def tiling_of(weight: Tensor, *, gated: bool) -> CompressedTiling | None:
    if not hopper.available(weight.device) or weight.dtype is not torch.bfloat16:
        return None
    rows, inner = weight.shape
    return choose_tiling(rows, inner, hopper.sm_count(weight.device), gated=gated)


def compressed_bytes(weight: Tensor) -> int:
    """Without the padding of the last unit."""
    return weight.numel() * RECORD // (GROUP * CHUNK)


def encode(weight: Tensor, tiling: CompressedTiling) -> Tensor | None:
    """[units, chunks, groups, RECORD] bytes, the last unit padded with zeros; None as `records`."""
    groups = arrange_rows(weight, gated=tiling.gated)  # a view, copied piece by piece
    chunks = weight.shape[1] // CHUNK
    shape = tiling.units, chunks, tiling.groups, RECORD
    data = torch.zeros(shape, dtype=torch.uint8, device=weight.device)
    step = max(1, _AT_ONCE // (tiling.groups * GROUP * weight.shape[1]))  # units
    for begin in range(0, tiling.units, step):
        here = groups[begin * tiling.groups : (begin + step) * tiling.groups]
        found = records(here)
        if found is None:
            return None
        for unit, part in enumerate(found.split(tiling.groups), begin):
            data[unit, :, : len(part)] = part.transpose(0, 1)
    return data


def records(groups: Tensor) -> Tensor | None:
    """[groups, 2, 8, inner] in bf16 → [groups, chunks, RECORD]; None if one has too many outliers.

    A record is 1024 low bytes, 512 bytes of upper bits (a lane reads 16 bytes at a time), and 8
    words: the base with the number of outliers, and the outliers.
    """
    bits = groups.contiguous().view(torch.int16).int() & 0xFFFF
    count, *_, inner = bits.shape
    chunks = inner // CHUNK
    # The 16 rows are 2 · 8, the 64 columns 4 · 2 · 4 · 2. A lane has one of each 8 and the 4 after,
    # and by steps of wgmma: both fours of columns, both of rows, both of columns.
    bits = bits.view(count, 2, 8, chunks, 4, 2, 4, 2).permute(0, 3, 2, 6, 4, 5, 1, 7)
    bits = bits.reshape(count, chunks, 32, 32)
    upper = bits >> 8 & 0x7F
    base, outliers = _bases(upper)
    if int(outliers.max()) > MAX_OUTLIERS:
        return None
    above = upper - base[..., None, None]
    is_outlier = (above < 0) | (above >= _REACH)
    above = above.masked_fill(is_outlier, 0).view(count, chunks, 32, 4, 2, 4)  # steps, halves, 4s
    sign = (bits >> 15).view(above.shape)
    low = (bits & 0xFF).view(count, chunks, 32, 2, 16).transpose(2, 3)
    # A byte holds a weight of the first half in bits 7 and 2 … 0. The second half is rotated by
    # four bits: 6 … 4, and bit 3 of the next byte.
    high = sign[..., 0, :] << 7 | above[..., 0, :] | above[..., 1, :] << 4
    high = high | sign[..., 1, :].roll(1, -1) << 3
    words = torch.zeros(count, chunks, 1 + MAX_OUTLIERS, dtype=torch.int32, device=bits.device)
    words[..., 0] = base | outliers << 8
    *where, lane, index = is_outlier.nonzero(as_tuple=True)  # those of a record are adjacent
    record = where[0] * chunks + where[1]
    first = outliers.flatten().cumsum(0) - outliers.flatten()
    nth = torch.arange(len(record), device=bits.device) - first[record]
    words[(*where, 1 + nth)] = bits[(*where, lane, index)] | (index << 16 | lane << 24).int()
    parts = low.flatten(2).to(torch.uint8), high.flatten(2).to(torch.uint8), words.view(torch.uint8)
    return torch.cat(parts, -1)


def _bases(upper: Tensor) -> tuple[Tensor, Tensor]:
    """[groups, chunks, 32, 32] → bases with the fewest outliers, and how many: [groups, chunks]"""
    largest = upper.amax((2, 3))
    best, fewest = largest, torch.full_like(largest, upper[0, 0].numel())
    for lower in range(_BASES):
        base = (largest - (_REACH - 1) - lower).clamp(min=0)
        above = upper - base[..., None, None]
        outliers = ((above < 0) | (above >= _REACH)).sum((2, 3), dtype=torch.int32)
        best = torch.where(outliers < fewest, base, best)
        fewest = torch.minimum(outliers, fewest)
    return best, fewest


def binary(tiling: CompressedTiling) -> nvrtc.Binary:
    sizes = {
        "TOKENS": MAX_TOKENS,
        "GROUPS": tiling.groups,
        "CHUNK": CHUNK,
        "STAGES": tiling.stages,
        "SPLIT": tiling.split,
        "GATED": int(tiling.gated),
        "THREADS": tiling.threads,
        "RECORD": RECORD,
        "PRODUCER_REGISTERS": _PRODUCER_REGISTERS,
        "CONSUMER_REGISTERS": tiling.consumer_registers,
        "POLLS": tiling.polls,
    }
    mma = hopper.mma_source(MAX_TOKENS, in_registers=True)
    return hopper.compile_source("compressed_gemm.cu", sizes, mma)


@cache
def _kernel(device: torch.device, tiling: CompressedTiling) -> nvrtc.Kernel | None:
    fallback = "weights are not compressed, and are read more slowly"
    sizes = {"threads": tiling.threads, "shared": tiling.shared}
    return hopper.load_kernel(
        device, "compressed_gemm", lambda: binary(tiling), **sizes, fallback=fallback
    )
