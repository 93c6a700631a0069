"""Kernels compiled ahead, several at once, and kept on disk.

A trial run under `noted` finds which kernels are wanted: launches of this thread are noted, and
neither compiled nor run. `compile_all` compiles them in threads, since a compiler lets go of
Python's lock. Triton keeps what it has compiled in a folder of its own (`triton_folder`).
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lopa.kernels import triton_start

Progress = Callable[[int, int], None]  # kernels compiled, and in all

_log = logging.getLogger(__name__)
_LOGGED_SECONDS = 1.0  # what took less is not worth a line
_noting = threading.local()  # .jobs: what this thread notes
_temporary: list[tempfile.TemporaryDirectory[str]] = []  # removed when the process ends
_patching = threading.Lock()  # one thread at a time notes


class Job(NamedTuple):
    name: str
    size: int  # of its source: longer ones take longer
    compile: Callable[[], object]


class Compiled(NamedTuple):
    name: str
    seconds: float
    error: str | None = None


Jobs = dict[Hashable, Job]


@contextmanager
def noted() -> Iterator[Jobs]:
    """Kernels that this thread launches are not run; those that are not compiled are jobs."""
    from triton import knobs
    from triton.runtime.jit import JITFunction

    triton_start.wait()
    ensure_triton_folder()
    jobs: Jobs = {}
    with _patching:
        hook, run = knobs.runtime.jit_cache_hook, JITFunction.run

        def note(**about: Any) -> bool | None:
            """Instead of a compilation. True: leave it out."""
            if _jobs() is None:
                return None if hook is None else hook(**about)
            kernel, data = about["fn"].jit_function, about["compile"]["specialization_data"]
            job = Job(about["fn"].name, len(kernel.src), partial(_compile_triton, kernel, data))
            jobs.setdefault((kernel, about["key"]), job)
            return True

        def run_or_note(self: Any, *given: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            return run(self, *given, grid=grid, warmup=warmup or is_noting(), **options)

        knobs.runtime.jit_cache_hook, JITFunction.run = note, run_or_note
        _noting.jobs = jobs
        try:
            yield jobs
        finally:
            _noting.jobs = None
            knobs.runtime.jit_cache_hook, JITFunction.run = hook, run


def is_noting() -> bool:
    """Whether kernels that this thread launches are noted, and not run."""
    return _jobs() is not None


def note(name: str, key: Hashable, size: int, compile: Callable[[], object]) -> bool:
    """Whether a kernel that Triton knows nothing of is noted: then it is not to be launched."""
    jobs = _jobs()
    if jobs is not None:
        jobs.setdefault((name, key), Job(name, size, compile))
    return jobs is not None


def compile_all(
    jobs: Jobs, device: torch.device, progress: Progress | None = None
) -> list[Compiled]:
    """The longest source first. One that fails is left to its first launch, which says why."""
    if not jobs:
        return []
    began = time.perf_counter()
    ordered = sorted(jobs.values(), key=lambda job: -job.size)
    pool = ThreadPoolExecutor(min(len(ordered), _cpus()), thread_name_prefix="compile")
    try:
        pending = [pool.submit(_run, job, device) for job in ordered]
        found = []
        if progress is not None:
            progress(0, len(pending))
        for done in as_completed(pending):
            found.append(done.result())
            if progress is not None:
                progress(len(found), len(pending))
    finally:
        pool.shutdown(cancel_futures=True)
    seconds = time.perf_counter() - began
    if seconds > _LOGGED_SECONDS:
        _log.info("kernels compiled", extra={"kernels": len(found), "seconds": seconds})
    for one in found:
        if one.error is not None:
            _log.warning("kernel not compiled", extra={"kernel": one.name, "error": one.error})
    return found


def triton_folder() -> Path:
    """Where Triton keeps compiled kernels."""
    from triton import knobs

    return Path(knobs.cache.dir)


def ensure_triton_folder() -> None:
    """A folder that cannot be written is replaced by a temporary one, with a warning."""
    from triton import knobs

    folder = triton_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        _temporary.append(tempfile.TemporaryDirectory(prefix="lopa-triton-"))
        knobs.cache.dir = _temporary[-1].name
        warnings.warn(
            f"compiled kernels cannot be kept in {folder} ({error.strerror}): every run compiles "
            "them anew, unless TRITON_CACHE_DIR names a folder that can be written",
            stacklevel=2,
        )


def _jobs() -> Jobs | None:
    return getattr(_noting, "jobs", None)


def _run(job: Job, device: torch.device) -> Compiled:
    began = time.perf_counter()
    error = None
    try:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            job.compile()
    except Exception as failure:  # a compiler can fail in any way
        error = f"{type(failure).__name__}: {failure}"
    return Compiled(job.name, time.perf_counter() - began, error)


def _compile_triton(kernel: Any, data: str) -> None:
    compiled = kernel.preload(data)
    _ = compiled.run  # loads it to the device, and builds what launches it


def _cpus() -> int:
    affinity = getattr(os, "sched_getaffinity", None)  # Linux has it
    return len(affinity(0)) if affinity else os.cpu_count() or 1
