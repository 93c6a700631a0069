"""Writing files whole or not at all, and finding out beforehand that they cannot be written."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from lopa.errors import ConfigError, LopaError


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Write atomically: a reader sees the old file or the whole new one."""
    path = path.resolve()  # a link stays a link
    try:
        if path.exists() and not path.is_file():  # a device or a pipe takes the lines as they come
            with path.open("w", encoding="utf-8") as stream:
                stream.writelines(line + "\n" for line in lines)
            return
    except OSError as error:
        raise LopaError(f"cannot write {path} ({error.strerror}): choose another place") from None
    try:
        _replace(path, (f"{line}\n".encode() for line in lines))
    except ValueError as error:
        raise LopaError(f"cannot write {path}: it cannot be put as JSON ({error})") from None


def write_bytes(path: Path, content: bytes) -> None:
    """The same for bytes."""
    _replace(path.resolve(), [content])


def _replace(path: Path, parts: Iterable[bytes]) -> None:
    temporary: str | None = None
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "wb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        raise LopaError(f"cannot write {path} ({error.strerror}): choose another place") from None
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)


def check_writable(path: Path, what: str) -> None:
    """Find out before a long run, not after it, that its record cannot be kept."""
    try:
        if path.is_dir():
            raise IsADirectoryError(0, "it is a folder")
        with tempfile.TemporaryFile(dir=path.resolve().parent):
            pass
        if path.exists() and not os.access(path, os.W_OK):
            raise PermissionError(0, "it may not be overwritten")
    except OSError as error:
        raise ConfigError(
            f"cannot write the {what} to {path} ({error.strerror}): choose another place"
        ) from None
