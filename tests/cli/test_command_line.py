"""The command as a whole: help, version, exit codes, interruption, pipes."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from cli_support import DUMMY, SHORT, Run

from lopa.engine.scheduler import Scheduler
from lopa.errors import CheckpointError
from lopa.version import VERSION


def test_version(run: Run) -> None:
    result = run("--version")
    assert (result.code, result.out, result.err) == (0, f"lopa {VERSION}\n", "")


def test_help_names_the_commands(run: Run) -> None:
    result = run("--help")
    assert result.code == 0
    for command in ("generate", "race", "chat", "models", "doctor"):
        assert command in result.out


def test_help_keeps_brackets(run: Run) -> None:
    """Rich would take them for markup."""
    assert "lopa[plots]" in run("bench", "serve", "--help").out


def test_nothing_heavy_is_imported_before_a_command_runs() -> None:
    heavy = "{'torch', 'numpy', 'tokenizers', 'safetensors', 'huggingface_hub'}"
    code = f"import sys, lopa.cli.main; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "0"}),
        ({"GOMP_SPINCOUNT": "5"}, {"GOMP_SPINCOUNT": "5", "KMP_BLOCKTIME": "0"}),
        ({"OMP_WAIT_POLICY": "active"}, {"OMP_WAIT_POLICY": "active"}),
    ],
)
def test_threads_wait_briefly(given: dict[str, str], expected: dict[str, str]) -> None:
    """Unless the user says otherwise; torch reads it, and the engine's process inherits it."""
    names = ("GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_WAIT_POLICY")
    code = (
        "import os, sys, lopa.cli.main as cli; cli.main(['--version']); "
        f"assert 'torch' not in sys.modules; print([os.environ.get(n) for n in {names}])"
    )
    clean = {name: value for name, value in os.environ.items() if name not in names}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**clean, **given}
    )
    assert done.stdout.splitlines()[-1] == str([expected.get(name) for name in names])


def test_python_dash_m() -> None:
    done = subprocess.run([sys.executable, "-m", "lopa", "--version"], capture_output=True)
    assert done.stdout.decode() == f"lopa {VERSION}\n"


def test_a_closed_pipe_is_quiet() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "lopa", "models", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.close()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err == b""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nosuch",), "nosuch"),
        (("generate",), "prompt"),
        (("generate", "x", "--nosuch"), "--nosuch"),
        (("generate", "x", "--decoder", "nosuch"), "fast-dllm"),
        (("generate", "x", "--branches", "many"), "--branches"),
        (("generate", "x", "--threshold", "high"), "--threshold"),
    ],
)
def test_usage_errors(run: Run, arguments: tuple[str, ...], words: str) -> None:
    result = run(*arguments)
    assert words in result.error
    assert result.code == 2


def _raising(error: BaseException) -> Any:
    def step(_: Scheduler) -> None:
        raise error

    return step


def test_interrupted(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "step", _raising(KeyboardInterrupt()))
    result = run("generate", "x", *SHORT)
    assert (result.code, result.out, result.err) == (130, "", "")


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a …"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
        MemoryError(),
    ],
)
def test_out_of_memory(run: Run, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    monkeypatch.setattr(Scheduler, "step", _raising(error))
    result = run("generate", "x", *SHORT)
    assert result.error.startswith("error: out of memory")
    assert result.code == 1


def test_a_full_disk(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "step", _raising(OSError(28, "No space left on device", "/x")))
    assert run("generate", "x", *SHORT).error == "error: /x: No space left on device"


def test_an_error_stays_one_line_and_harmless(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "step", _raising(CheckpointError("bad\nname \x1b[31m")))
    assert run("generate", "x", *SHORT).error == "error: bad name ␛[31m"


def test_a_bug_keeps_its_traceback(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "step", _raising(RuntimeError("a bug")))
    with pytest.raises(RuntimeError, match="a bug"):
        run("generate", "x", *DUMMY)
