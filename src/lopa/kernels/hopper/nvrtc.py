"""CUDA kernels, compiled at run time by NVRTC and launched by the driver, both through ctypes.

For instructions of Hopper that Triton makes little use of. torch for CUDA comes with NVRTC;
`compiler` is None where it is missing nevertheless.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

ARCHITECTURE = "sm_90a"
CAPABILITY = (9, 0)  # of the devices that run it

# From cuda.h
_REGISTERS, _MAX_DYNAMIC_SHARED = 4, 8  # attributes of a function
_PROGRAMMATIC_STREAM_SERIALIZATION = 6
_BFLOAT16, _NO_INTERLEAVE, _SWIZZLE_128, _L2_PROMOTION_256, _ZEROS_OUTSIDE = 9, 0, 3, 3, 0
_MOST_AXES, _LARGEST_BOX, _SWIZZLED = 5, 256, 128  # the last in bytes


class Binary(NamedTuple):
    code: bytes  # a cubin
    log: str  # of the compiler, with registers and spills


def compile_source(
    name: str,
    source: str,
    defines: Mapping[str, int],
    headers: Mapping[str, str] | None = None,  # by name, for its #include lines
) -> Binary:
    library = compiler()
    if library is None:
        raise RuntimeError(f"{name} cannot be compiled: there is no libnvrtc")
    options = [
        *(f"--gpu-architecture={ARCHITECTURE}", "--std=c++17", "--ptxas-options=-v"),
        *(f"-D{key}={value}" for key, value in defines.items()),
    ]
    names, texts = _texts(headers or {}), _texts((headers or {}).values())
    program = ctypes.c_void_p()
    given = ctypes.byref(program), source.encode(), name.encode(), len(names), texts, names
    call(library, "nvrtcCreateProgram", *given)
    try:
        status = library.nvrtcCompileProgram(program, len(options), _texts(options))
        log = _result(library, "ProgramLog", program).rstrip(b"\0").decode()
        if status:
            raise RuntimeError(f"{name} does not compile (status {status}):\n{log}")
        return Binary(_result(library, "CUBIN", program), log)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


@cache
def version() -> tuple[int, int] | None:
    """Of the compiler; None where there is none."""
    library = compiler()
    if library is None:
        return None
    major, minor = ctypes.c_int(), ctypes.c_int()
    call(library, "nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


class TensorMap:
    """A CUtensorMap of a bf16 view: axes in any order, the last one dense.

    TMA copies a box of it, with rows swizzled by 128 bytes and zeros outside the tensor.
    """

    def __init__(self, view: Tensor, box: Sequence[int]) -> None:
        _check_view(view, box)
        self._memory = ctypes.create_string_buffer(128 + 63)
        self.address = -(-ctypes.addressof(self._memory) // 64) * 64
        rank = view.dim()  # the driver lists axes with the dense one first
        call(
            driver(),
            "cuTensorMapEncodeTiled",
            *(ctypes.c_void_p(self.address), _BFLOAT16, rank, ctypes.c_void_p(view.data_ptr())),
            (ctypes.c_uint64 * rank)(*reversed(view.shape)),
            (ctypes.c_uint64 * rank)(*(2 * stride for stride in reversed(view.stride()[:-1]))),
            (ctypes.c_uint32 * rank)(*reversed(box)),
            (ctypes.c_uint32 * rank)(*[1] * rank),
            *(_NO_INTERLEAVE, _SWIZZLE_128, _L2_PROMOTION_256, _ZEROS_OUTSIDE),
        )


class Kernel:
    """A function of a binary on one device."""

    def __init__(
        self, device: torch.device, binary: Binary, name: str, *, threads: int, shared: int
    ) -> None:
        self.device, self.threads, self.shared = device, threads, shared
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        with torch.cuda.device(device):
            torch.cuda.mem_get_info()  # the driver's calls need a context: the runtime makes it
            call(driver(), "cuModuleLoadData", ctypes.byref(self._module), binary.code)
            found = ctypes.byref(self._function), self._module, name.encode()
            call(driver(), "cuModuleGetFunction", *found)
            call(driver(), "cuFuncSetAttribute", self._function, _MAX_DYNAMIC_SHARED, shared)
            count = ctypes.c_int()
            call(driver(), "cuFuncGetAttribute", ctypes.byref(count), _REGISTERS, self._function)
        self.registers = count.value  # per thread at launch

    def launch(self, grid: Sequence[int], *arguments: TensorMap | Tensor | int) -> None:
        """On torch's current stream, or into the graph that it captures.

        With programmatic dependent launch: it starts before the kernel in front of it has ended,
        and must execute griddepcontrol.wait before it touches what that one reads or writes.
        """
        values = [_value(argument) for argument in arguments]
        pointers = (ctypes.c_void_p * len(values))(*map(_address, values))
        early = _Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION, b"", (1,))
        with torch.cuda.device(self.device):
            config = _Config(
                (*grid, 1, 1)[:3],
                (self.threads, 1, 1),
                self.shared,
                torch.cuda.current_stream().cuda_stream,
                ctypes.pointer(early),
                1,
            )
            given = ctypes.byref(config), self._function, pointers, None
            call(driver(), "cuLaunchKernelEx", *given)


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_char * 4), ("value", ctypes.c_int * 16))


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


@cache
def compiler() -> ctypes.CDLL | None:
    for path in _compilers():
        try:
            library = ctypes.CDLL(path)
            # It opens its builtins by name. In a pip package they lie beside it, where the loader
            # does not search, but a library that is loaded already is found by its name.
            folder = Path(loaded_path("libnvrtc.so") or path).parent
            for builtins in folder.glob("libnvrtc-builtins.so.*"):
                ctypes.CDLL(str(builtins))
        except OSError:
            continue
        return library
    return None


@cache
def driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def loaded_path(name: str) -> str | None:
    """The file of a shared library that this process has loaded; None if it has not."""
    if not Path("/proc/self/maps").exists():  # not Linux
        return None
    with open("/proc/self/maps", encoding="utf-8") as maps:
        paths = (line.rstrip("\n").split(maxsplit=5)[5] for line in maps if name in line)
        return next(paths, None)


def _compilers() -> Iterator[str]:
    """Where NVRTC may be. A torch without CUDA has none loaded, but kernels still compile."""
    if path := loaded_path("libnvrtc.so"):
        yield path
    name = f"libnvrtc.so.{(torch.version.cuda or '13').split('.')[0]}"
    yield name
    for folder in sys.path:
        yield from map(str, Path(folder).glob(f"nvidia/*/lib/{name}"))


def _check_view(view: Tensor, box: Sequence[int]) -> None:
    shape, strides = tuple(view.shape), view.stride()
    if view.dtype is not torch.bfloat16:
        raise ValueError(f"a tensor map is of bfloat16, not {view.dtype}")
    if not 1 <= len(shape) <= _MOST_AXES or len(box) != len(shape):
        raise ValueError(f"a tensor map has one to five axes, as the box: {shape}, box {box}")
    if 0 in shape:
        raise ValueError(f"a tensor map of an empty tensor: {shape}")
    if not all(1 <= size <= _LARGEST_BOX for size in box) or 2 * box[-1] > _SWIZZLED:
        raise ValueError(f"a box of {box}: at most 256 of an axis, and 64 of the last")
    if strides[-1] != 1 or any(2 * stride % 16 for stride in strides[:-1]):
        raise ValueError(f"strides of {strides}: the last must be 1, the others whole 16 bytes")
    if view.data_ptr() % 16:
        raise ValueError("a tensor map begins at a multiple of 16 bytes")


def _value(argument: object) -> Any:
    """The argument as the C value that the kernel takes."""
    match argument:
        case TensorMap():
            return argument
        case Tensor():
            return ctypes.c_void_p(argument.data_ptr())
        case int() if -(2**31) <= argument < 2**31:
            return ctypes.c_int(argument)
        case int():
            raise ValueError(f"a kernel takes integers of 32 bits: {argument}")
    raise TypeError(f"a kernel takes no {type(argument).__name__}")


def _address(value: Any) -> int:
    return value.address if isinstance(value, TensorMap) else ctypes.addressof(value)


def _texts(texts: Any) -> Any:
    """char *[]"""
    encoded = [text.encode() for text in texts]
    return (ctypes.c_char_p * len(encoded))(*encoded)


def _result(library: ctypes.CDLL, name: str, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    call(library, f"nvrtcGet{name}Size", program, ctypes.byref(size))
    result = ctypes.create_string_buffer(size.value)
    call(library, f"nvrtcGet{name}", program, result)
    return result.raw


def call(library: ctypes.CDLL, name: str, *given: Any) -> None:
    status = getattr(library, name)(*given)
    if status:
        raise RuntimeError(f"{name} failed with status {status}")
