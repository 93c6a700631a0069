"""Weights of 12¼ bits that are their bf16 exactly, and products of few tokens by them on Hopper.

So few tokens take as long as their weights take to be read: three quarters of it so. `packed.cu` is
the kernel; measurements/kernels.md has what it gains.

Of the eight bits of a weight's exponent the upper seven are much the same for all of them. A
record, 16 rows by 64 columns, has the least of these once, its base, and for every weight in three
bits what is to be added to it; sign, lowest bit of the exponent and fraction are as they were. The
few weights that are out of reach, about one in ten thousand, are in the record as they are.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from lopa.kernels.hopper import common as hopper
from lopa.kernels.hopper import nvrtc as cuda
from lopa.kernels.hopper.common import ALIGNMENT, CHUNK, GROUP, STAGES_BYTES, arranged

TOKENS = 64  # at most
PATCHES = 7  # weights of a record that may be out of reach
RECORD = GROUP * CHUNK * 12 // 8 + 4 + 4 * PATCHES  # bytes
_REACH = 8  # values that three bits tell
_BASES = 6  # that are tried: the highest that is good for the largest weight, and lower ones
_MOST_GROUPS = 20  # of a unit: the sums of more do not fit in the registers
_LEAST_GROUPS = 12  # of a unit: with 7 of them, which read more of x, Dream's down was slower
_MOST_SPLITS = 8
_LEAST_BYTES = 64 << 20  # of a weight in bf16: below it the library is as fast
_COPYING = 40  # registers of a thread that copies
_AT_ONCE = 1 << 24  # weights that are packed at once: what is made on the way is many times larger


class Plan(NamedTuple):
    """How a weight is cut: what is together in memory, and who has which part."""

    groups: int  # of a unit
    units: int
    split: int  # blocks to a unit
    gated: bool
    patience: int = 1 << 12  # how often a block looks whether the others of a unit are there

    @property
    def threads(self) -> int:
        return 128 * (1 + -(-self.groups // 4))

    @property
    def launched(self) -> int:
        """Registers that a thread is launched with."""
        return hopper.registers(self.threads)

    @property
    def multiplying(self) -> int:
        """Registers of a thread that multiplies: what is left by those that copy, by eights."""
        left = self.launched * self.threads - 128 * _COPYING
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
        return TOKENS * CHUNK * 2 + self.groups * RECORD

    @property
    def parts(self) -> int:
        """Bytes in which blocks that share a unit leave their sums."""
        return 0 if self.split == 1 else self.units * self.split * self.groups * GROUP * TOKENS * 4

    def blocks(self, processors: int) -> int:
        return min(self.units, processors) * self.split


def plan(rows: int, inner: int, processors: int, *, gated: bool) -> Plan | None:
    """None where the library is as good."""
    if rows % (2 * GROUP) or inner % CHUNK or 2 * rows * inner < _LEAST_BYTES:
        return None
    groups, chunks = rows // GROUP, inner // CHUNK
    plans = []
    for split in range(1, _MOST_SPLITS + 1):
        at_once = processors // split  # units
        if not at_once:
            break
        waves = -(-groups // (at_once * _MOST_GROUPS)) if split == 1 else 1
        size = -(-groups // (at_once * waves))
        one = Plan(size, -(-groups // size), split, gated)
        if _LEAST_GROUPS <= size <= _MOST_GROUPS and chunks // split >= one.stages:
            plans.append(one)

    def time(one: Plan) -> int:
        """Of the busiest processor, in records."""
        waves = -(-one.units * one.split // processors)
        return waves * one.groups * -(-chunks // one.split)

    # Fewer shares have less to add up: a gain of a fiftieth is not worth it.
    least = min(map(time, plans), default=0)
    return next((one for one in plans if 50 * time(one) <= 51 * least), None)


class Packed:
    """A weight [rows, inner] by records. If gated: gate before up, activated in one go.

    The weight itself must not change from then on, and products by it are made one at a time.
    """

    def __init__(self, made: Plan, data: Tensor, columns: int, inner: int) -> None:
        self.plan, self.data, self.columns, self.inner = made, data, columns, inner
        shape = made.units if made.split > 1 else 0, 1 + made.split
        self._arrived = torch.zeros(shape, dtype=torch.int32, device=data.device)

    def suits(self, x: Tensor) -> bool:
        return len(x) <= TOKENS and x.dtype is torch.bfloat16 and x.is_contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, inner] → [tokens, columns]

        The weight is read while the kernel before this one is at work, which must not write it.
        """
        kernel = _kernel(x.device, self.plan)
        if kernel is None or not self.suits(x):
            raise ValueError(f"no kernel for {list(x.shape)} in {x.dtype}")
        out = x.new_empty(len(x), self.columns)
        parts = torch.empty(self.plan.parts, dtype=torch.uint8, device=x.device)
        kernel.launch(
            (self.plan.blocks(hopper.processors(x.device)),),
            cuda.TensorMap(x, (TOKENS, CHUNK)),
            *(self.data, out, len(x), self.columns, self.inner, self.plan.units),
            *(parts, self._arrived),
        )
        return out


def packed(weight: Tensor, *, gated: bool) -> Packed | None:
    """[rows, inner] in bf16; None where it cannot be told so, or is better left as it is."""
    made = planned(weight, gated=gated)
    if made is None or _kernel(weight.device, made) is None:
        return None
    rows, inner = weight.shape
    data = laid_out(weight, made)
    return data if data is None else Packed(made, data, rows // 2 if gated else rows, inner)


def planned(weight: Tensor, *, gated: bool) -> Plan | None:
    if not hopper.available(weight.device) or weight.dtype is not torch.bfloat16:
        return None
    rows, inner = weight.shape
    return plan(rows, inner, hopper.processors(weight.device), gated=gated)


def packed_bytes(weight: Tensor) -> int:
    """That it takes in memory, but for the groups of nothing in its last unit."""
    return weight.numel() * RECORD // (GROUP * CHUNK)


def laid_out(weight: Tensor, made: Plan) -> Tensor | None:
    """[units, chunks, groups, RECORD] bytes; the last unit may have groups of nothing."""
    groups = arranged(weight, gated=made.gated)  # a view, copied piece by piece
    chunks = weight.shape[1] // CHUNK
    shape = made.units, chunks, made.groups, RECORD
    data = torch.zeros(shape, dtype=torch.uint8, device=weight.device)
    step = max(1, _AT_ONCE // (made.groups * GROUP * weight.shape[1]))  # units
    for begin in range(0, made.units, step):
        here = groups[begin * made.groups : (begin + step) * made.groups]
        found = records(here)
        if found is None:
            return None
        for unit, part in enumerate(found.split(made.groups), begin):
            data[unit, :, : len(part)] = part.transpose(0, 1)
    return data


def records(groups: Tensor) -> Tensor | None:
    """[groups, 2, 8, inner] in bf16 → [groups, chunks, RECORD]; None if too much is out of reach.

    1024 low bytes and 512 of other bits, 16 of each to a lane at a time; then 8 words: the base and
    how many are out of reach, and each of these.
    """
    bits = groups.contiguous().view(torch.int16).int() & 0xFFFF
    count, *_, inner = bits.shape
    chunks = inner // CHUNK
    # The 16 rows are 2 · 8, the 64 columns 4 · 2 · 4 · 2. A lane has one of each 8 and the 4 after,
    # and by steps of wgmma: both fours of columns, both of rows, both of columns.
    bits = bits.view(count, 2, 8, chunks, 4, 2, 4, 2).permute(0, 3, 2, 6, 4, 5, 1, 7)
    bits = bits.reshape(count, chunks, 32, 32)
    upper = bits >> 8 & 0x7F
    base, misses = _bases(upper)
    if int(misses.max()) > PATCHES:
        return None
    above = upper - base[..., None, None]
    missed = (above < 0) | (above >= _REACH)
    above = above.masked_fill(missed, 0).view(count, chunks, 32, 4, 2, 4)  # steps, halves, fours
    sign = (bits >> 15).view(above.shape)
    low = (bits & 0xFF).view(count, chunks, 32, 2, 16).transpose(2, 3)
    # A byte has a weight of the first half in bits 7 and 2 … 0. Of the second half all is turned by
    # four bits: 6 … 4, and bit 3 of the next byte.
    high = sign[..., 0, :] << 7 | above[..., 0, :] | above[..., 1, :] << 4
    high = high | sign[..., 1, :].roll(1, -1) << 3
    words = torch.zeros(count, chunks, 1 + PATCHES, dtype=torch.int32, device=bits.device)
    words[..., 0] = base | misses << 8
    *place, lane, slot = missed.nonzero(as_tuple=True)  # those of a record follow one another
    record = place[0] * chunks + place[1]
    first = misses.flatten().cumsum(0) - misses.flatten()
    nth = torch.arange(len(record), device=bits.device) - first[record]
    patch = bits[(*place, lane, slot)] | (slot << 16 | lane << 24).int()
    words[(*place, 1 + nth)] = patch
    parts = low.flatten(2).to(torch.uint8), high.flatten(2).to(torch.uint8), words.view(torch.uint8)
    return torch.cat(parts, -1)


def _bases(upper: Tensor) -> tuple[Tensor, Tensor]:
    """[groups, chunks, 32, 32] → bases with the fewest misses, and how many: [groups, chunks]"""
    largest = upper.amax((2, 3))
    best, fewest = largest, torch.full_like(largest, upper[0, 0].numel())
    for lower in range(_BASES):
        base = (largest - (_REACH - 1) - lower).clamp(min=0)
        above = upper - base[..., None, None]
        misses = ((above < 0) | (above >= _REACH)).sum((2, 3), dtype=torch.int32)
        best = torch.where(misses < fewest, base, best)
        fewest = torch.minimum(misses, fewest)
    return best, fewest


def binary(made: Plan) -> cuda.Binary:
    sizes = {
        "TOKENS": TOKENS,
        "GROUPS": made.groups,
        "CHUNK": CHUNK,
        "STAGES": made.stages,
        "SPLIT": made.split,
        "GATED": int(made.gated),
        "THREADS": made.threads,
        "RECORD": RECORD,
        "COPYING": _COPYING,
        "MULTIPLYING": made.multiplying,
        "PATIENCE": made.patience,
    }
    return hopper.compiled("compressed_gemm.cu", sizes, hopper.mma(TOKENS, in_registers=True))


@cache
def _kernel(device: torch.device, made: Plan) -> cuda.Kernel | None:
    lost = "weights are not packed, and read more slowly"
    sizes = {"threads": made.threads, "shared": made.shared}
    return hopper.kernel(device, "packed", lambda: binary(made), **sizes, lost=lost)
