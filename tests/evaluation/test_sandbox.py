"""The sandbox lets correct code pass, and nothing else, and the code does no harm."""

import os
import time
from pathlib import Path

import pytest

from lopa.errors import LopaError
from lopa.evaluation.sandbox import Judge, run

FRAME_SEARCH = """
try:
    1 / 0
except ZeroDivisionError as error:
    frame = error.__traceback__.tb_frame
    while frame:
        for value in frame.f_locals.values():
            if isinstance(value, bytes):
                __import__("os").write(3, value)
        frame = frame.f_back
"""
JUDGE = """
def prepare(payload):
    wanted = int(payload)
    def judge(code):
        names = {}
        exec(code, names)
        assert names["x"] == wanted
    return judge
"""
WRITE_TO_EVERY_PIPE = """
import os
for descriptor in range(1024):
    try:
        os.write(descriptor, b"passed" * 10)
    except OSError:
        pass
"""


@pytest.mark.parametrize(
    "code",
    [
        "",
        "assert 1 + 1 == 2",
        "print('x' * 100000)",
        "import math, re, itertools, functools, collections, string\nassert math.prod([2, 3]) == 6",
        "from collections import namedtuple\nassert namedtuple('P', 'a b')(1, 2).a == 1",
        "from typing import NamedTuple\nclass P(NamedTuple):\n    a: int\nassert P(1).a == 1",
        "try:\n    import os\n    os.fork()\nexcept OSError:\n    pass",
    ],
)
def test_code_that_reaches_its_end_passes(code: str) -> None:
    assert run(code).passed


@pytest.mark.parametrize(
    "code",
    [
        "assert False",
        "def f(:",
        "1 / 0",
        "\ud800",
        "x = '\0'\n\0",
        "import sys\nsys.exit(0)",
        "import os\nos._exit(0)",
        "raise SystemExit",
        "raise BaseException",
        "x = bytearray(10 ** 10)",
        "x = [0]\nwhile True:\n    x += x",
        "def f():\n    f()\nf()",
        "import os\nos.fork()",
        "import os\nos.system('true')",
        "import os\nos.execv('/bin/true', ['true'])",
        "import os\nos.posix_spawn('/bin/true', ['true'], {})",
        "import subprocess\nsubprocess.run(['true'])",
        "import _posixsubprocess",
        "import socket\nsocket.socket()",
        "import _socket\n_socket.socket()",
        "import ctypes",
        "import os\nos.kill(os.getppid(), 15)",
        "import gc\ngc.get_objects()",
        "import sys\nsys._getframe()",
        "import sys\nsys.settrace(print)",
        "open('/proc/self/mem', 'rb')",
        "open('/proc/self/environ')",
        "open('file', 'w')",
        "import os\nos.mkdir('folder')",
        "import os\nos.symlink('/', 'link')",
        FRAME_SEARCH,
        WRITE_TO_EVERY_PIPE,
    ],
)
def test_code_that_misbehaves_fails(code: str) -> None:
    assert not run(code, timeout=2.0).passed


def test_files_outside_are_neither_written_nor_removed(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("kept")
    tmp_path.chmod(0o777)
    kept.chmod(0o666)
    for code in (
        f"open({str(kept)!r}, 'w')",
        f"open({str(tmp_path / 'new')!r}, 'x')",
        f"import os\nos.open({str(kept)!r}, os.O_WRONLY | os.O_TRUNC)",
        f"import os\nos.remove({str(kept)!r})",
        f"import os\nos.rename({str(kept)!r}, {str(tmp_path / 'new')!r})",
        f"import os\nos.truncate({str(kept)!r}, 0)",
        f"import pathlib\npathlib.Path({str(kept)!r}).unlink()",
    ):
        assert not run(code).passed
    assert kept.read_text() == "kept"
    assert [entry.name for entry in tmp_path.iterdir()] == ["kept"]


@pytest.mark.parametrize("code", ["while True:\n    pass", "import time\ntime.sleep(60)"])
def test_code_that_does_not_end_is_stopped(code: str) -> None:
    start = time.monotonic()
    outcome = run(code, timeout=0.5)
    assert not outcome.passed
    assert outcome.reason == "timeout"
    assert time.monotonic() - start < 2.0


def test_no_descriptor_is_leaked() -> None:
    run("pass")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        run("pass")
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_environment_is_not_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOPA_SECRET", "1")
    assert run("import os\nassert 'LOPA_SECRET' not in os.environ").passed


def test_reason_names_the_exception() -> None:
    assert run("assert False").reason == "AssertionError"


def test_a_run_is_fast() -> None:
    start = time.monotonic()
    for _ in range(5):
        assert run("assert True").passed
    assert time.monotonic() - start < 5 * 0.5


def test_a_judge_runs_the_code() -> None:
    judge = Judge(JUDGE, b"7", ())
    assert run("x = 7", judge=judge).passed
    assert run("x = 8", judge=judge).reason == "AssertionError"
    assert run("y = 7", judge=judge).reason == "KeyError"
    for code in (FRAME_SEARCH, WRITE_TO_EVERY_PIPE, "open('file', 'w')", "import os\nos.fork()"):
        assert not run(code, judge=judge).passed


def test_a_judge_that_cannot_run_is_an_error() -> None:
    with pytest.raises(LopaError, match="ValueError"):
        run("x = 7", judge=Judge(JUDGE, b"seven", ()))
    with pytest.raises(LopaError, match="No module named 'absent'"):
        run("x = 7", judge=Judge("import absent", b"", ()))
