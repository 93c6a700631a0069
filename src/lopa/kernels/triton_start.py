"""What Triton does once in a process before its first kernel, begun early, beside other work.

To find its kernels on disk it hashes its own library of 400 MB, which takes a second or two. A
thread does that without Python's lock while torch is imported and weights are read.
"""

from __future__ import annotations

import threading
from importlib.util import find_spec
from pathlib import Path

_NVIDIA = Path("/dev/nvidiactl")  # there is a driver, as far as can be told without torch
_started = threading.Lock()
_thread: threading.Thread | None = None


def begin() -> None:
    """Safe to call again."""
    global _thread
    with _started:
        if _thread is None and find_spec("triton") is not None:
            _thread = threading.Thread(target=_hash, name="triton-start", daemon=True)
            _thread.start()


def begin_if_gpu() -> None:
    """Before torch is there to ask."""
    if _NVIDIA.exists():
        begin()


def wait() -> None:
    if _thread is not None:
        _thread.join()


def _hash() -> None:
    from triton.runtime.cache import triton_key

    triton_key()  # Triton keeps the result
