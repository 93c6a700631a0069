"""Triton compiles the products of experts for Hopper as they are meant, which needs no device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import lopa

pytestmark = pytest.mark.engine


def test_products_of_experts(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {
        "TRITON_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": str(Path(lopa.__file__).parents[1]),
    }
    script = Path(__file__).with_name("compile_for_hopper.py")
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == 8
    for line in lines:
        assert line["wgmma"] > 0, line
        assert line["copies"] > 0, line
        assert line["stack"] == 0, line  # nothing is spilled
        # Two programs of few tokens share a multiprocessor, or three.
        assert line["shared"] < (113 if line["name"].endswith(" 16") else 226) * 1024, line
