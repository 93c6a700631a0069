"""Linear layers in bf16 by a table of cuBLASLt algorithms.

cuBLASLt has many algorithms for a shape and proposes one. On an H200 another is often faster, by up
to a fifth (measurements/kernels.md). Timing them at run time would make answers depend on noise, so
the table is part of the package: `cublaslt_algorithms.json`, written by
`measurements/cublaslt_algorithms.py`. Shapes, devices and versions of cuBLASLt that are not in it
are left to torch.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from lopa.kernels.hopper.nvrtc import call, loaded_path

WORKSPACE = 64 << 20  # bytes, for algorithms that split the inner axis

# From cublasLt.h and library_types.h
_COMPUTE_32F, _R_32F, _R_16BF = 68, 0, 14
_TRANSA, _EPILOGUE, _BIAS_POINTER = 3, 7, 8
_EPILOGUE_BIAS = 4


class Shape(NamedTuple):
    """[tokens, inner] · [columns, inner]ᵀ"""

    tokens: int
    columns: int
    inner: int
    bias: bool

    @classmethod
    def of(cls, x: Tensor, weight: Tensor, bias: Tensor | None) -> Shape:
        columns, inner = weight.shape
        return cls(len(x), columns, inner, bias is not None)


Algorithm = tuple[int, ...]  # 64 opaque bytes, which are valid for one version of cuBLASLt


class HeuristicResult(ctypes.Structure):
    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


class CublasLt:
    """The few calls that a product takes, for one thread and one stream per device."""

    def __init__(self, path: str, device: torch.device) -> None:
        self._calls = ctypes.CDLL(path)
        self._calls.cublasLtGetVersion.restype = ctypes.c_size_t
        self.version = int(self._calls.cublasLtGetVersion())
        self._handle = ctypes.c_void_p()
        self._call("Create", ctypes.byref(self._handle))
        self._workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=device)
        self._one, self._zero = ctypes.c_float(1), ctypes.c_float(0)
        self._described: dict[Shape, tuple[ctypes.c_void_p, ...]] = {}

    @classmethod
    def on(cls, device: torch.device) -> Self | None:
        """None where torch links it statically."""
        torch.zeros(8, 8, device=device) @ torch.zeros(8, 8, device=device)  # loads it
        path = loaded_path("libcublasLt.so")
        return cls(path, device) if path else None

    def supports(self, shape: Shape, algorithm: Algorithm) -> bool:
        what, w, x, out = self._describe(shape)
        given, found = (ctypes.c_uint64 * 8)(*algorithm), HeuristicResult()
        check = self._calls.cublasLtMatmulAlgoCheck
        code = int(
            check(*(self._handle, what, w, x, out, out), ctypes.byref(given), ctypes.byref(found))
        )
        return code == 0 and int(found.workspace) <= WORKSPACE

    def linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, algorithm: Algorithm
    ) -> Tensor:
        """x [tokens, inner] and weight [columns, inner] in bf16, contiguous."""
        shape = Shape.of(x, weight, bias)
        what, w, given, made = self._describe(shape)
        if bias is not None:
            self._set(what, _BIAS_POINTER, ctypes.c_uint64(bias.data_ptr()))
        out = torch.empty(shape.tokens, shape.columns, dtype=x.dtype, device=x.device)
        stream = torch.cuda.current_stream(x.device).cuda_stream
        pointers = [ctypes.c_void_p(t.data_ptr()) for t in (weight, x, out, self._workspace)]
        self._call(
            "Matmul",
            *(self._handle, what, ctypes.byref(self._one), pointers[0], w, pointers[1], given),
            *(ctypes.byref(self._zero), pointers[2], made, pointers[2], made),
            ctypes.byref((ctypes.c_uint64 * 8)(*algorithm)),
            *(pointers[3], ctypes.c_size_t(WORKSPACE), ctypes.c_void_p(stream)),
        )
        return out

    def _describe(self, shape: Shape) -> tuple[ctypes.c_void_p, ...]:
        """The product in cuBLASLt's column-major terms: outᵀ = (weightᵀ)ᵀ · xᵀ."""
        if shape not in self._described:
            what = ctypes.c_void_p()
            self._call("MatmulDescCreate", ctypes.byref(what), _COMPUTE_32F, _R_32F)
            self._set(what, _TRANSA, ctypes.c_int(1))
            if shape.bias:
                self._set(what, _EPILOGUE, ctypes.c_int(_EPILOGUE_BIAS))
            tokens, columns, inner, _ = shape
            self._described[shape] = (
                what,
                self._layout(inner, columns),
                self._layout(inner, tokens),
                self._layout(columns, tokens),
            )
        return self._described[shape]

    def _layout(self, rows: int, columns: int) -> ctypes.c_void_p:
        layout = ctypes.c_void_p()
        sizes = ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(rows)
        self._call("MatrixLayoutCreate", ctypes.byref(layout), _R_16BF, *sizes)
        return layout

    def _set(self, what: ctypes.c_void_p, attribute: int, value: Any) -> None:
        size = ctypes.c_size_t(ctypes.sizeof(value))
        self._call("MatmulDescSetAttribute", what, attribute, ctypes.byref(value), size)

    def _call(self, name: str, *given: Any) -> None:
        call(self._calls, f"cublasLt{name}", *given)


class CublasLtTable:
    """x · weightᵀ + bias by the table, or by torch where it lacks the shape."""

    def __init__(self, algorithms: Mapping[Shape, Algorithm], library: CublasLt | None) -> None:
        self.library = library
        self.algorithms = {
            shape: algorithm
            for shape, algorithm in algorithms.items()
            if library is not None and library.supports(shape, algorithm)
        }

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        algorithm = self.algorithms.get(Shape.of(x, weight, bias))
        if algorithm is None or x.dtype is not torch.bfloat16 or not weight.is_contiguous():
            return F.linear(x, weight, bias)
        assert self.library is not None  # else the table is empty
        return self.library.linear(x.contiguous(), weight, bias, algorithm)


@cache
def cublaslt_table(device: torch.device) -> CublasLtTable:
    """The table of this device and the version of cuBLASLt that is loaded."""
    if device.type != "cuda" or torch.version.cuda is None:
        return CublasLtTable({}, None)
    entries = all_entries()
    name = torch.cuda.get_device_name(device)
    library = CublasLt.on(device) if name in {entry["device"] for entry in entries} else None
    algorithms = algorithms_of(entries, name, library.version) if library else {}
    return CublasLtTable(algorithms, library)


def all_entries() -> list[dict[str, Any]]:
    """The file of the package: one entry per device and version of cuBLASLt."""
    found: list[dict[str, Any]] = json.loads(
        files("lopa.kernels").joinpath("cublaslt_algorithms.json").read_text(encoding="utf-8")
    )
    return found


def algorithms_of(
    entries: list[dict[str, Any]], device: str, version: int
) -> dict[Shape, Algorithm]:
    return {
        Shape(*line["shape"]): tuple(line["algorithm"])
        for entry in entries
        if (entry["device"], entry["version"]) == (device, version)
        for line in entry["algorithms"]
    }
