"""Kernels compiled ahead: which ones, in what order, and what is kept of them."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from triton import knobs
from triton.runtime import cache
from triton.runtime.jit import JITFunction

import lopa
from lopa.kernels import compilation, triton_start
from lopa.kernels.compilation import Job
from lopa.kernels.hopper import binary_cache, nvrtc, swiglu_gemm
from lopa.kernels.hopper.common import Unlaunched
from lopa.kernels.hopper.swiglu_gemm import GemmTiling

CPU = torch.device("cpu")


def job(name: str, size: int, compile: Callable[[], object] = int) -> Job:
    return Job(name, size, compile)


def test_all_are_compiled_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits for the other, so one after the other they would never end."""
    both = threading.Barrier(2)
    shown: list[tuple[int, int]] = []
    jobs: compilation.Jobs = {n: job(f"kernel {n}", n, lambda: both.wait(30)) for n in range(2)}
    monkeypatch.setattr(compilation, "_cpus", lambda: 2)
    found = compilation.compile_all(jobs, CPU, lambda *progress: shown.append(progress))
    assert {one.name for one in found} == {"kernel 0", "kernel 1"}
    assert not any(one.error for one in found)
    assert shown == [(0, 2), (1, 2), (2, 2)]


def test_the_longest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "_cpus", lambda: 1)
    order: list[int] = []
    jobs: compilation.Jobs = {n: job("", n, lambda n=n: order.append(n)) for n in (3, 1, 2)}  # type: ignore[misc]
    compilation.compile_all(jobs, CPU)
    assert order == [3, 2, 1]


def test_one_that_fails_is_left_to_its_launch(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise RuntimeError("no such instruction")

    with caplog.at_level(logging.WARNING, "lopa.kernels"):
        found = compilation.compile_all({0: job("bad", 1, fail), 1: job("good", 2)}, CPU)
    errors = {one.name: one.error for one in found}
    assert errors == {"bad": "RuntimeError: no such instruction", "good": None}
    assert "kernel not compiled" in caplog.text


def test_nothing_to_compile() -> None:
    assert compilation.compile_all({}, CPU, lambda *_: pytest.fail("no progress")) == []


def test_triton_is_left_as_it_was() -> None:
    run, hook = JITFunction.run, knobs.runtime.jit_cache_hook
    with suppress(ZeroDivisionError), compilation.noted():
        assert JITFunction.run is not run
        raise ZeroDivisionError
    assert (JITFunction.run, knobs.runtime.jit_cache_hook) == (run, hook)
    assert not compilation.note("kernel", 1, 1, int)


def test_other_threads_are_not_noted() -> None:
    noted: list[bool] = []
    with compilation.noted() as jobs:
        other = threading.Thread(target=lambda: noted.append(compilation.note("other", 1, 1, int)))
        other.start()
        other.join()
        assert compilation.note("own", 1, 1, int)
    assert noted == [False]
    assert [one.name for one in jobs.values()] == ["own"]


def test_a_cuda_kernel_is_noted_once_and_not_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[GemmTiling] = []
    monkeypatch.setattr(swiglu_gemm, "_kernel", lambda device, tiling: loaded.append(tiling))
    tiling = GemmTiling(128, gated=True)
    with compilation.noted() as jobs:
        for _ in range(2):
            kernel = swiglu_gemm._known_kernel(CPU, tiling)
            assert isinstance(kernel, Unlaunched)
            kernel.launch((1,))
    assert not loaded
    compilation.compile_all(jobs, CPU)
    assert loaded == [tiling]


def test_triton_is_started_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[str] = []
    monkeypatch.setattr(triton_start, "_thread", None)
    monkeypatch.setattr(cache, "triton_key", lambda: hashed.append(threading.current_thread().name))
    triton_start.wait()  # nothing was begun
    for _ in range(2):
        triton_start.begin()
    triton_start.wait()
    assert hashed == ["triton-start"]


def test_triton_is_not_started_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(triton_start, "_thread", None)
    monkeypatch.setattr(triton_start, "_NVIDIA", tmp_path / "nothing")
    triton_start.begin_if_gpu()
    assert triton_start._thread is None


# -- what is kept -------------------------------------------------------------------------------


def test_a_folder_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    there = Path(os.devnull) / "triton"
    with knobs.cache.scope():
        monkeypatch.setenv("TRITON_CACHE_DIR", str(there))
        with pytest.warns(UserWarning, match="TRITON_CACHE_DIR"):
            compilation.ensure_triton_folder()
        instead = compilation.triton_folder()
        assert instead != there
        (instead / "file").touch()
        compilation.ensure_triton_folder()  # without a warning
        assert compilation.triton_folder() == instead


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., nvrtc.Binary]:
    monkeypatch.setenv("LOPA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(nvrtc, "version", lambda: (13, 0))

    def compiled(calls: list[int], **about: object) -> nvrtc.Binary:
        def compile() -> nvrtc.Binary:
            calls.append(1)
            return nvrtc.Binary(b"\x7fELF" + str(about).encode(), "registers: 168 ✓")

        return binary_cache.kept_or(compile, "kernel.cu", about)

    return compiled


def test_a_binary_is_compiled_once(compiled: Callable[..., nvrtc.Binary]) -> None:
    calls: list[int] = []
    first = compiled(calls, tokens=64, source="…")
    assert compiled(calls, source="…", tokens=64) == first
    assert len(calls) == 1
    assert compiled(calls, tokens=128, source="…") != first
    assert len(calls) == 2


def test_another_compiler_compiles_again(
    compiled: Callable[..., nvrtc.Binary], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    compiled(calls, tokens=64)
    monkeypatch.setattr(nvrtc, "version", lambda: (13, 1))
    compiled(calls, tokens=64)
    assert len(calls) == 2


@pytest.mark.parametrize("keep", [0, 5, 40, -1])
def test_a_file_that_was_cut_off(
    compiled: Callable[..., nvrtc.Binary], tmp_path: Path, keep: int
) -> None:
    calls: list[int] = []
    first = compiled(calls, tokens=64)
    (path,) = (tmp_path / "cuda_kernels").iterdir()
    path.write_bytes(path.read_bytes()[:keep])
    assert compiled(calls, tokens=64) == first
    assert len(calls) == 2


def test_binaries_that_cannot_be_kept(
    compiled: Callable[..., nvrtc.Binary], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOPA_CACHE_DIR", os.devnull)
    calls: list[int] = []
    assert compiled(calls, tokens=64) == compiled(calls, tokens=64)
    assert len(calls) == 2


# -- as on a Hopper ------------------------------------------------------------------------------


@pytest.mark.engine
def test_the_kernels_of_rounds_are_noted_ahead(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {
        "TRITON_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": str(Path(lopa.__file__).parents[1]),
    }
    script = Path(__file__).with_name("noted_for_hopper.py")
    done = subprocess.run(
        [sys.executable, str(script), "--compile"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    models = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(models) == 5
    for found in models:
        assert found["late"] == [], found["model"]
        # Each takes seconds: no two for arguments that are aligned here and not there.
        is_fp32 = "float32" in found["model"]
        # In half precision also for a long prefix
        assert found["kernels"]["_attend"] == (2 if is_fp32 else 4), found["model"]
        assert found["kernels"]["_merge"] == (1 if is_fp32 else 2), found["model"]
        only = "_walk" if found["is_whole"] else "_weighted_sum"
        for kernel in ("_write_kv", "_rotate", "_gather", "_finish", only):
            assert found["kernels"][kernel] == 1, (found["model"], kernel)
    assert models[-1]["kernels"]["_gate_up"] == models[-1]["kernels"]["_down"] == 4  # tile sizes
    for found in (models[0], models[-1]):
        assert [one["error"] for one in found["compiled"]] == [None, None]
    assert models[0]["left"] == 2  # what was compiled is not noted again
