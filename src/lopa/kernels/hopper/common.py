"""What the kernels in CUDA for Hopper have in common: where they run, how they are compiled."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import cache
from importlib.resources import files

import torch
from torch import Tensor

from lopa.kernels.hopper import nvrtc as cuda

GROUP = 16  # rows of a weight that are together: see `arranged`
EIGHT = 8  # of them, and of tokens, that wgmma has together
CHUNK = 64  # of the inner axis, that a stage holds: 128 bytes, a row of the swizzle
ALIGNMENT = 1024  # bytes, of the stages
STAGES_BYTES = 227 * 1024 - 512 - ALIGNMENT  # that a block has for them, less some for barriers
_REGISTERS = 65536  # of a processor


@cache
def available(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability(device) == cuda.CAPABILITY and bool(cuda.compiler())


@cache
def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def registers(threads: int) -> int:
    """That each of so many is launched with: all there are, by eights."""
    return _REGISTERS // threads // 8 * 8


def arranged(weight: Tensor, *, gated: bool) -> Tensor:
    """[rows, inner] → [groups, 2, 8, inner], a group's rows as wgmma has them.

    A thread has q of either eight: 2q and 2q + 1 of the weight, or q of gate and of up.
    """
    if gated:
        return weight.unflatten(0, (2, -1, EIGHT)).transpose(0, 1)
    return weight.unflatten(0, (-1, EIGHT, 2)).transpose(1, 2)


def mma(tokens: int, *, in_registers: bool) -> str:
    """sums += weight · xᵀ, one wgmma of 64 rows, so many tokens and 16 of the inner axis.

    x is in shared memory, and the weight there too or in registers.
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
      "setp.ne.b32 p, %{sums + weights + 1}, 0;\\n"  // else the sums begin from zero
      "wgmma.mma_async.sync.aligned.m64n{tokens}k16.f32.bf16.bf16 "
      "{{{listed}}}, {factor}, %{sums + weights}, p, 1, 1, {turned};\\n}}"
      : {operands}
      : {given}, "l"(x), "r"(add));
}}
"""


def compiled(name: str, sizes: Mapping[str, int], mma: str) -> cuda.Binary:
    """`name` lies beside this file; `mma` is what the function of that name gives."""
    here = files("lopa.kernels.hopper")
    source, common = (here.joinpath(n).read_text(encoding="utf-8") for n in (name, "common.h"))
    return cuda.compiled(name, source, sizes, {"common.h": common, "mma.h": mma})


def kernel(
    device: torch.device,
    name: str,
    binary: Callable[[], cuda.Binary],
    *,
    threads: int,
    shared: int,
    lost: str,
) -> cuda.Kernel | None:
    """None where it cannot be made, which is told with what is `lost`: a round does without it."""
    try:
        found = cuda.Kernel(device, binary(), name, threads=threads, shared=shared)
        wanted = registers(threads)
        if found.registers < wanted:  # it would ask for more than there are, and wait
            raise RuntimeError(f"{name}.cu has {found.registers} registers, not {wanted}")
    except RuntimeError as error:
        warnings.warn(f"{lost}: {error}", stacklevel=2)
        return None
    return found
