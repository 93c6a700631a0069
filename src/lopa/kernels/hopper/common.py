"""What the CUDA kernels for Hopper share: where they run, how weights are arranged, compilation."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.resources import files

import torch
from torch import Tensor

from lopa.kernels.hopper import nvrtc
from lopa.kernels.hopper.binary_cache import kept_or

GROUP = 16  # rows of a weight that are stored together: see `arrange_rows`
EIGHT = 8  # rows or tokens of a core matrix of wgmma
CHUNK = 64  # of the inner axis, per pipeline stage: 128 bytes, a row of the swizzle
ALIGNMENT = 1024  # bytes, of the stages
STAGES_BYTES = 227 * 1024 - 512 - ALIGNMENT  # of shared memory for stages; the rest is barriers
_REGISTERS = 65536  # of a multiprocessor
SOURCE_SIZE = 4000  # of a kernel to compile, as `compilation` puts them in order


@cache
def available(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability(device) == nvrtc.CAPABILITY and bool(nvrtc.compiler())


@cache
def sm_count(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def registers_per_thread(threads: int) -> int:
    """Of a block of so many threads that has a multiprocessor to itself; a multiple of 8."""
    return _REGISTERS // threads // 8 * 8


def arrange_rows(weight: Tensor, *, gated: bool) -> Tensor:
    """[rows, inner] → [groups, 2, 8, inner]: the rows of a group in the order of wgmma.

    A thread holds row q of both eights: rows 2q and 2q + 1 of the weight, or if gated row q of
    gate and row q of up.
    """
    if gated:
        return weight.unflatten(0, (2, -1, EIGHT)).transpose(0, 1)
    return weight.unflatten(0, (-1, EIGHT, 2)).transpose(1, 2)


def mma_source(tokens: int, *, in_registers: bool) -> str:
    """CUDA source of sums += weight · xᵀ: one wgmma of 64 rows, so many tokens, 16 inner columns.

    x is in shared memory. The weight is there too, or in registers.
    """
    sums, weights = tokens // 2, 4 if in_registers else 1
    listed = ", ".join(f"%{i}" for i in range(sums))
    operands = ", ".join(f'"+f"(sums[{i}])' for i in range(sums))
    if in_registers:
        kind = "const unsigned (&weight)[4]"
        factor = "{" + ", ".join(f"%{sums + i}" for i in range(4)) + "}"
        given, turned = ", ".join(f'"r"(weight[{i}])' for i in range(4)), "0"
    else:
        kind, factor = "unsigned long long weight", f"%{sums}"
        given, turned = '"l"(weight)', "0, 0"
    return f"""
__device__ __forceinline__ void mma(
    float (&sums)[{sums}], {kind}, unsigned long long x, int add) {{
  asm volatile(
      "{{\\n.reg .pred p;\\n"
      "setp.ne.b32 p, %{sums + weights + 1}, 0;\\n"  // else the sums start at zero
      "wgmma.mma_async.sync.aligned.m64n{tokens}k16.f32.bf16.bf16 "
      "{{{listed}}}, {factor}, %{sums + weights}, p, 1, 1, {turned};\\n}}"
      : {operands}
      : {given}, "l"(x), "r"(add));
}}
"""


def compile_source(name: str, sizes: Mapping[str, int], mma: str) -> nvrtc.Binary:
    """The file `name` beside this one, with `mma_source`'s result as mma.h."""
    here = files("lopa.kernels.hopper")
    source, common = (here.joinpath(n).read_text(encoding="utf-8") for n in (name, "common.h"))
    headers = {"common.h": common, "mma.h": mma}
    return kept_or(
        lambda: nvrtc.compile_source(name, source, sizes, headers),
        name,
        {"source": source, **headers, **sizes},
    )


class Unlaunched:
    """In place of a kernel that is not compiled yet, in a trial run."""

    def launch(self, grid: Sequence[int], *arguments: object) -> None: ...


def load_kernel(
    device: torch.device,
    name: str,
    binary: Callable[[], nvrtc.Binary],
    *,
    threads: int,
    shared: int,
    fallback: str,
) -> nvrtc.Kernel | None:
    """None where it cannot be compiled or loaded, after a warning that names the fallback."""
    try:
        found = nvrtc.Kernel(device, binary(), name, threads=threads, shared=shared)
        wanted = registers_per_thread(threads)
        if found.registers < wanted:  # setmaxnreg would wait forever for the missing ones
            raise RuntimeError(f"{name}.cu has {found.registers} registers, not {wanted}")
    except RuntimeError as error:
        warnings.warn(f"{fallback}: {error}", stacklevel=2)
        return None
    return found
