"""Matrix products in bf16 by the algorithm that was the fastest in a trial on such a device.

The library has many for one shape and proposes one; on an H200 another is often faster, by up to a
fifth (measurements/kernels.md).
Trying them at run time would make an answer depend on the noise of the trial, so the choice is a
table that belongs to the package (`cublaslt_algorithms.json`, made by `measurements/products.py`).
Shapes, devices and versions of the library that it does not know go by torch's own choice.
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

from lopa.kernels.hopper.nvrtc import call, loaded

WORKSPACE = 64 << 20  # bytes, which algorithms that split the inner axis need

# Of cublasLt.h and library_types.h
_COMPUTE_32F, _R_32F, _R_16BF = 68, 0, 14
_TRANSA, _EPILOGUE, _BIAS_POINTER = 3, 7, 8
_EPILOGUE_BIAS = 4
_MAX_WORKSPACE = 1


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


Algorithm = tuple[int, ...]  # the library's own 64 bytes: good for one version of it


class _Found(ctypes.Structure):
    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


class Library:
    """The few calls of cublasLt that a product takes, for one thread and one stream a device."""

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
        """None where torch has it inside."""
        torch.zeros(8, 8, device=device) @ torch.zeros(8, 8, device=device)  # so that it is loaded
        path = loaded("libcublasLt.so")
        return cls(path, device) if path else None

    def proposals(self, shape: Shape, most: int = 64) -> list[Algorithm]:
        """What the library would take, the first of them first."""
        preference = ctypes.c_void_p()
        self._call("MatmulPreferenceCreate", ctypes.byref(preference))
        size = ctypes.c_uint64(WORKSPACE)
        self._call(
            "MatmulPreferenceSetAttribute",
            preference,
            _MAX_WORKSPACE,
            ctypes.byref(size),
            ctypes.c_size_t(8),
        )
        found, count = (_Found * most)(), ctypes.c_int()
        what, w, x, out = self._describe(shape)
        self._call(
            "MatmulAlgoGetHeuristic",
            *(self._handle, what, w, x, out, out, preference),
            most,
            found,
            ctypes.byref(count),
        )
        self._call("MatmulPreferenceDestroy", preference)
        return [tuple(one.algorithm) for one in found[: count.value]]

    def can(self, shape: Shape, algorithm: Algorithm) -> bool:
        what, w, x, out = self._describe(shape)
        given, found = (ctypes.c_uint64 * 8)(*algorithm), _Found()
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
        """The product as the library sees it, by columns: outᵀ = (weightᵀ)ᵀ · xᵀ."""
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


class Products:
    """x · weightᵀ + bias, by the table where it has the shape."""

    def __init__(self, table: Mapping[Shape, Algorithm], library: Library | None) -> None:
        self.library = library
        self.table = {
            shape: algorithm
            for shape, algorithm in table.items()
            if library is not None and library.can(shape, algorithm)
        }

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        algorithm = self.table.get(Shape.of(x, weight, bias))
        if algorithm is None or x.dtype is not torch.bfloat16 or not weight.is_contiguous():
            return F.linear(x, weight, bias)
        assert self.library is not None  # or the table would be empty
        return self.library.linear(x.contiguous(), weight, bias, algorithm)


@cache
def products_on(device: torch.device) -> Products:
    """Those of this device and the library that is there."""
    if device.type != "cuda" or torch.version.cuda is None:
        return Products({}, None)
    entries = known()
    name = torch.cuda.get_device_name(device)
    library = Library.on(device) if name in {entry["device"] for entry in entries} else None
    return Products(table_of(entries, name, library.version) if library else {}, library)


def known() -> list[dict[str, Any]]:
    """What the package knows, an entry for each device and version of the library."""
    found: list[dict[str, Any]] = json.loads(
        files("lopa.kernels").joinpath("cublaslt_algorithms.json").read_text(encoding="utf-8")
    )
    return found


def table_of(entries: list[dict[str, Any]], device: str, version: int) -> dict[Shape, Algorithm]:
    return {
        Shape(*line["shape"]): tuple(line["algorithm"])
        for entry in entries
        if (entry["device"], entry["version"]) == (device, version)
        for line in entry["products"]
    }
