"""Triton compiles kernels for Hopper as they are meant, which needs no device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import lopa

pytestmark = pytest.mark.engine


def compiled(which: str, cache: Path) -> list[dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {
        "TRITON_CACHE_DIR": str(cache),
        "PYTHONPATH": str(Path(lopa.__file__).parents[1]),
    }
    script = Path(__file__).with_name("compile_for_hopper.py")
    done = subprocess.run(
        [sys.executable, str(script), which],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_products_of_experts(tmp_path: Path) -> None:
    lines = compiled("experts", tmp_path)
    assert len(lines) == 8
    for line in lines:
        assert line["wgmma"] > 0, line
        assert line["copies"] > 0, line
        assert line["stack"] == 0, line  # nothing is spilled
        # Two programs of few tokens share a multiprocessor, or three.
        assert line["shared"] < (113 if line["name"].endswith(" 16") else 226) * 1024, line


def test_lattice(tmp_path: Path) -> None:
    """What the interpreter runs, the compiler may refuse."""
    lines = compiled("lattice", tmp_path)
    assert len(lines) == 7
    for line in lines:
        assert line["stack"] <= 16, line  # hardly anything is spilled
