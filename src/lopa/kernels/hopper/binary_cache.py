"""Compiled CUDA kernels, kept on disk.

A file is found by all that its binary depends on. One that cannot be read counts as none, and a
folder that cannot be written is no error: the next run compiles again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from lopa.atomic_write import write_bytes
from lopa.cache_folder import cache_folder
from lopa.errors import LopaError
from lopa.kernels.hopper import nvrtc

_MARK = b"lopa kernel\n"


def binary_folder() -> Path:
    return cache_folder("cuda_kernels")


def kept_or(
    compile: Callable[[], nvrtc.Binary], name: str, about: Mapping[str, object]
) -> nvrtc.Binary:
    """about: what the binary depends on."""
    known = json.dumps([name, nvrtc.ARCHITECTURE, nvrtc.version(), *sorted(about.items())])
    digest = hashlib.sha256(known.encode()).hexdigest()
    path = binary_folder() / f"{name.partition('.')[0]}-{digest[:32]}"
    found = _load(path)
    if found is None:
        found = compile()
        _save(path, found)
    return found


def _load(path: Path) -> nvrtc.Binary | None:
    """The digest of the rest comes first: a file that was cut off is not loaded to a device."""
    try:
        content = path.expanduser().read_bytes()
    except (OSError, RuntimeError):  # RuntimeError: there is no home folder
        return None
    mark, digest, rest = content[: len(_MARK)], content[len(_MARK) :][:32], content[len(_MARK) :]
    rest = rest[32:]
    if mark != _MARK or hashlib.sha256(rest).digest() != digest:
        return None
    size = int.from_bytes(rest[:8], "little")
    return nvrtc.Binary(rest[8 + size :], rest[8 : 8 + size].decode())


def _save(path: Path, binary: nvrtc.Binary) -> None:
    log = binary.log.encode()
    rest = len(log).to_bytes(8, "little") + log + binary.code
    with suppress(OSError, RuntimeError, LopaError):
        place = path.expanduser()
        place.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(place, _MARK + hashlib.sha256(rest).digest() + rest)
