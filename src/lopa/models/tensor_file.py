"""A safetensors file that is read by boxes of its tensors, straight to where they belong.

Nothing is mapped into memory: a box is read into its target itself, or through a buffer of a few
megabytes where it has to be cast, moved to a device or cut out of its rows.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from lopa.errors import CheckpointError
from lopa.models.files import safetensors_header

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_BUFFER = 32 * 2**20  # bytes
_SEEK = 16 * 2**10  # bytes: parts of rows from this size on are read by themselves


class TensorFile:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.header = safetensors_header(path)
        self._file = path.open("rb", buffering=0)
        self._data = 8 + int.from_bytes(os.pread(self._file.fileno(), 8, 0), "little")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()

    def place(self, key: str) -> int:
        """Where a tensor begins: for reading in this order."""
        return int(self.header[key]["data_offsets"][0])

    def read(self, key: str, box: tuple[slice, ...], into: Tensor) -> None:
        """Write a box of a tensor to `into`, in its precision and on its device."""
        entry = self.header[key]
        shape, dtype = tuple(entry["shape"]), _DTYPES.get(entry["dtype"])
        begin, end = entry["data_offsets"]
        if dtype is None:
            raise CheckpointError(f"{self.path}: tensor {key} is stored as {entry['dtype']}")
        if end - begin != math.prod(shape) * dtype.itemsize:
            raise CheckpointError(
                f"{self.path}: tensor {key} has {end - begin} bytes, which is not its shape: "
                "fetch it again"
            )
        self._read(self._data + begin, shape, dtype, box, into)

    def _read(
        self,
        offset: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        box: tuple[slice, ...],
        into: Tensor,
    ) -> None:
        if not shape:
            self._read_rows(offset, 1, dtype, into.view(1))
            return
        rows, row = box[0], math.prod(shape[1:])
        offset += rows.start * row * dtype.itemsize
        inside = tuple(zip(box[1:], shape[1:], strict=True))
        if all(part == slice(0, size) for part, size in inside):
            self._read_rows(offset, row, dtype, into)
        elif len(shape) == 2 and len(into[0]) * dtype.itemsize < _SEEK:
            self._read_columns(offset, row, dtype, box[1], into)
        else:
            for number, here in enumerate(into):
                at = offset + number * row * dtype.itemsize
                self._read(at, shape[1:], dtype, box[1:], here)

    def _read_rows(self, offset: int, row: int, dtype: torch.dtype, into: Tensor) -> None:
        """Whole rows that follow each other."""
        if into.device.type == "cpu" and into.dtype == dtype and into.is_contiguous():
            self._fill(into.view(-1).view(torch.uint8), offset)
            return
        for number, rows in self._blocks(into, row * dtype.itemsize):
            at = offset + number * row * dtype.itemsize
            flat = self._fetch(at, len(rows) * row, dtype)
            rows.copy_(flat.view(rows.shape))

    def _read_columns(
        self, offset: int, row: int, dtype: torch.dtype, columns: slice, into: Tensor
    ) -> None:
        """A part of each row, by way of the whole row."""
        for number, rows in self._blocks(into, row * dtype.itemsize):
            at = offset + number * row * dtype.itemsize
            rows.copy_(self._fetch(at, len(rows) * row, dtype).view(len(rows), row)[:, columns])

    def _blocks(self, into: Tensor, row_bytes: int) -> list[tuple[int, Tensor]]:
        """Rows that fit the buffer together, each with the number of its first."""
        step = max(1, _BUFFER // max(1, row_bytes))
        return [(first, into[first : first + step]) for first in range(0, len(into), step)]

    def _fetch(self, offset: int, count: int, dtype: torch.dtype) -> Tensor:
        found = torch.empty(count, dtype=dtype)
        self._fill(found.view(torch.uint8), offset)
        return found

    def _fill(self, into: Tensor, offset: int) -> None:
        """into: bytes, on the host."""
        view = memoryview(into.numpy())  # type: ignore[arg-type]
        while len(view):
            try:
                count = os.preadv(self._file.fileno(), [view], offset)
            except OSError as error:
                raise CheckpointError(
                    f"{self.path} cannot be read ({error.strerror}): fetch it again"
                ) from None
            if not count:
                raise CheckpointError(f"{self.path} is cut off: fetch it again")
            view, offset = view[count:], offset + count
