"""Whole-file writes: a reader finds the old content or the new, never a part of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


def write(path: Path, save: Callable[[Path], object]) -> None:
    """`save` writes a file beside `path`, which then takes its place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    save(partial)
    partial.chmod(0o644)  # some writers leave files that only their owner may read
    os.replace(partial, path)


def write_text(path: Path, text: str) -> None:
    write(path, lambda partial: partial.write_text(text, encoding="utf-8"))
