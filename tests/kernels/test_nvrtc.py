"""CUDA kernels up to the driver: what is compiled, the arguments of its calls, and its errors."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lopa.kernels.hopper import nvrtc

SOURCE = '#include "factor.h"\nextern "C" __global__ void scale(float* x) { *x *= FACTOR + MORE; }'

DEVICE = torch.device("cuda:1")


class FakeDriver:
    """Records its calls in `seen`; `statuses` makes some of them fail."""

    def __init__(self, **statuses: int) -> None:
        self.statuses = statuses
        self.device: torch.device | None = None  # the one that is current
        self.has_context = False  # the thread's own, made by the first call of the runtime
        self.seen: dict[str, Any] = {}
        self.devices: dict[str, torch.device | None] = {}

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*given: Any) -> int:
            self.seen[name] = given
            self.devices[name] = self.device
            if not self.has_context and not name.startswith("cuTensorMap"):
                return 201
            if name == "cuLaunchKernelEx":
                self.launched(given[0]._obj, given[2])
            return self.statuses.get(name, 0)

        return call

    def launched(self, config: Any, pointers: Any) -> None:
        """Reads the arguments during the call: their memory is freed behind it."""
        kinds = ctypes.c_void_p, ctypes.c_int
        values = [kind.from_address(p).value for kind, p in zip(kinds, pointers, strict=False)]
        self.seen["values"] = values, list(pointers)[2:]
        # The bytes of CUlaunchConfig: grid, block, shared memory, stream, attributes, their number
        *sizes, stream, attributes, count = struct.unpack("@7I2NI4x", bytes(config))
        self.seen["config"] = sizes[:3], sizes[3:6], sizes[6], stream
        # And of a CUlaunchAttribute: its id, padding, a union of 64 bytes
        self.seen["attributes"] = (
            count,
            *struct.unpack("@i4xi60x", ctypes.string_at(attributes, 72)),
        )


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    driver = FakeDriver()

    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        driver.device = device
        yield
        driver.device = None

    monkeypatch.setattr(nvrtc, "driver", lambda: driver)
    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=77))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: setattr(driver, "has_context", True))
    return driver


def kernel() -> nvrtc.Kernel:
    binary = nvrtc.Binary(b"code", "")
    return nvrtc.Kernel(DEVICE, binary, "scale", threads=384, shared=4096)


def test_compiles_for_hopper() -> None:
    binary = nvrtc.compile_source(
        "scale.cu", SOURCE, {"FACTOR": 3}, {"factor.h": "#define MORE 0.5f"}
    )
    assert binary.code.startswith(b"\x7fELF")
    assert "'scale' for 'sm_90a'" in binary.log


def test_the_error_holds_the_compiler_log() -> None:
    with pytest.raises(RuntimeError, match=r'scale\.cu does not compile(.|\n)*"FACTOR" is undef'):
        nvrtc.compile_source("scale.cu", SOURCE, {}, {"factor.h": "#define MORE 0.5f"})


def test_the_compiler_comes_from_a_package_or_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the loader does not find it by its name."""
    asked: list[str] = []
    real = ctypes.CDLL

    def only_files(path: str) -> ctypes.CDLL:
        asked.append(path)
        if "/" not in path:
            raise OSError(path)
        return real(path)

    monkeypatch.setattr(ctypes, "CDLL", only_files)
    monkeypatch.setattr(nvrtc, "loaded_path", lambda name: None)
    assert nvrtc.compiler.__wrapped__() is not None
    assert asked[0].startswith("libnvrtc.so.")
    folders = {Path(path).parent for path in asked[1:]}
    assert len(folders) == 1
    names = [Path(path).name for path in asked[1:]]
    assert names[0] == asked[0]
    assert names[1].startswith("libnvrtc-builtins.so.")
    monkeypatch.setattr("sys.path", [])
    assert nvrtc.compiler.__wrapped__() is None
    monkeypatch.setattr(nvrtc, "compiler", lambda: None)
    with pytest.raises(RuntimeError, match="there is no libnvrtc"):
        nvrtc.compile_source("scale.cu", SOURCE, {})


def test_loaded_path() -> None:
    path = nvrtc.loaded_path("libc.so")
    assert path is not None
    assert Path(path).is_file()
    assert nvrtc.loaded_path("libnothing.so") is None


def test_a_kernel_gets_its_arguments(fake: FakeDriver) -> None:
    x = torch.zeros(4, 64, dtype=torch.bfloat16)
    box = nvrtc.TensorMap(x, (2, 64))
    kernel().launch((5, 2), x, -3, box)
    assert fake.devices["cuModuleLoadData"] == fake.devices["cuLaunchKernelEx"] == DEVICE
    assert fake.seen["cuFuncSetAttribute"][1:] == (8, 4096)
    assert fake.seen["cuModuleGetFunction"][2] == b"scale"
    assert fake.seen["values"] == ([x.data_ptr(), -3], [box.address])
    assert fake.seen["config"] == ([5, 2, 1], [384, 1, 1], 4096, 77)
    assert fake.seen["attributes"] == (1, 6, 1)


def test_wrong_arguments_of_a_kernel(fake: FakeDriver) -> None:
    with pytest.raises(TypeError, match="no str"):
        kernel().launch((1,), "x")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="32 bits: 2147483648"):
        kernel().launch((1,), 2**31)
    assert "cuLaunchKernelEx" not in fake.seen


@pytest.mark.parametrize("name", ["cuModuleLoadData", "cuFuncSetAttribute", "cuLaunchKernelEx"])
def test_errors_of_the_driver(fake: FakeDriver, name: str) -> None:
    fake.statuses[name] = 209
    with pytest.raises(RuntimeError, match=f"{name} failed with status 209"):
        kernel().launch((1,))


def test_a_tensor_map_of_a_view(fake: FakeDriver) -> None:
    x = torch.zeros(6, 8, 64, dtype=torch.bfloat16)
    found = nvrtc.TensorMap(x.transpose(0, 1), (4, 3, 32))
    assert found.address % 64 == 0
    at, kind, rank, base, sizes, strides, box, steps, *modes = fake.seen["cuTensorMapEncodeTiled"]
    assert (at.value, base.value) == (found.address, x.data_ptr())
    assert (kind, rank, modes) == (9, 3, [0, 3, 3, 0])
    assert list(sizes) == [64, 6, 8]
    assert list(strides)[:2] == [8 * 64 * 2, 64 * 2]
    assert list(box) == [32, 3, 4]
    assert list(steps) == [1, 1, 1]


@pytest.mark.parametrize(
    ("view", "box", "reason"),
    [
        (torch.zeros(4, 64), (4, 64), "bfloat16, not torch.float32"),
        (torch.zeros(4, 64).bfloat16(), (64,), "as the box"),
        (torch.zeros(1, 1, 1, 1, 1, 64).bfloat16(), (1, 1, 1, 1, 1, 64), "one to five axes"),
        (torch.zeros(0, 64).bfloat16(), (1, 64), "empty tensor"),
        (torch.zeros(4, 64).bfloat16(), (257, 64), "at most 256"),
        (torch.zeros(4, 128).bfloat16(), (4, 128), "64 of the last"),
        (torch.zeros(64, 64).bfloat16().t(), (4, 64), "the last must be 1"),
        (torch.zeros(4, 68).bfloat16(), (4, 64), "whole 16 bytes"),
        (torch.zeros(65).bfloat16()[1:], (64,), "begins at a multiple of 16"),
    ],
)
def test_views_without_a_tensor_map(
    fake: FakeDriver, view: torch.Tensor, box: tuple[int, ...], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        nvrtc.TensorMap(view, box)
    assert not fake.seen
