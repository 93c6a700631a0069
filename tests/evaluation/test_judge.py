"""The judge: right answers pass whatever they are made of, wrong ones do not, and it ends clean."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from judge_cases import Case, behind, cases

from lopa.errors import LopaError
from lopa.evaluation.judge import judge
from lopa.evaluation.sandbox.walls import LANDLOCK, NAMESPACES, NONE
from lopa.evaluation.sandbox.zygote_client import ZYGOTES, Kit, Zygote
from lopa.evaluation.scoring import score
from lopa.tasks import SPLITS, generate


@pytest.fixture(params=[NAMESPACES, LANDLOCK], autouse=True)
def walls(request: pytest.FixtureRequest) -> Iterator[str]:
    """Verdicts are the same behind either kind of walls."""
    with behind(request.param):
        yield request.param


def passes(answer: str, tests: str, **options: str) -> bool:
    return judge(answer, tests, **options).passed  # type: ignore[arg-type]


@pytest.mark.parametrize("case", cases("right_answers"), ids=str)
def test_right_answers_pass(case: Case) -> None:
    assert judge(case.answer, case.tests).reason == "passed"


IS_OPEN = """
def is_open(descriptor):
    try:
        return bool(os.fstat(descriptor)) and descriptor
    except OSError:
        return 0
"""
PURE = """
    abc array ast base64 binascii bisect bz2 calendar cmath codecs collections collections.abc
    colorsys concurrent.futures configparser contextlib contextvars copy copyreg csv ctypes
    dataclasses datetime decimal difflib dis email.message enum fractions functools graphlib
    gzip hashlib heapq hmac html html.parser inspect io ipaddress itertools json keyword
    linecache locale logging lzma marshal math numbers operator optparse pathlib pickle pprint
    queue random re reprlib sched secrets shlex string statistics struct symtable tarfile
    textwrap threading time timeit token tokenize traceback types typing unicodedata unittest
    urllib.parse uuid warnings weakref xml.etree.ElementTree zipfile zlib zoneinfo
"""


def test_modules_of_pure_computation_can_be_imported() -> None:
    answer = "import importlib\ndef f(name): return importlib.import_module(name).__name__"
    tests = f"for name in {PURE.split()}:\n    assert f(name) == name, name"
    assert judge(answer, tests, seconds=20).reason == "passed"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("def f(): return 2", "AssertionError"),
        ("def f(: return 1", "SyntaxError"),
        ("1 / 0", "ZeroDivisionError"),
        ("def f(): raise KeyError", "KeyError"),
        ("", "NameError"),
        ("def f():\n    return f()", "RecursionError"),
        ("def f(): return [0] * 10 ** 10", "MemoryError"),
        ("x = bytearray(10 ** 10)", "MemoryError"),
        ("def f():\n    x = [0]\n    while True: x += x", "MemoryError"),
        ("import sys\nsys.exit(0)", "SystemExit"),
        ("import sys\ndef f(): sys.exit(0)", "SystemExit"),
        ("import os\nos._exit(0)", "ended early"),
        ("import os\ndef f(): os._exit(0)", "ended early"),
        ("raise BaseException", "BaseException"),
        ("import os\ndef f(): os.close(max(range(64), key=is_open))" + IS_OPEN, "ended early"),
        ("import ctypes\ndef f(): ctypes.string_at(0)", "signal 11"),
        ("\ud800", "not encodable"),
        ("x = '\0'\n\0", "SyntaxError"),
        ("def f():\n    x = 1\n    for _ in range(300): x = [x]\n    return x", "RecursionError"),
        ("def f():\n    x = []\n    x.append(x)\n    return x", "RecursionError"),
        ("def f(): return object()", "TypeError"),
        ("class passed(Exception): pass\nraise passed", "Exception"),
    ],
)
def test_wrong_answers_fail_and_say_why(answer: str, reason: str) -> None:
    outcome = judge(answer, "assert f() == 1")
    assert not outcome.passed
    assert outcome.reason == reason or (sys.version_info < (3, 12) and reason == "SyntaxError")


def test_names_of_the_tests_are_not_the_answer_s() -> None:
    """Python's own, those of modules, and those of `given` where it is known."""
    answer = "def f(x): return 5\ndef set(x): return 1\ndef all(x): return True\ndef g(x): return 1"
    assert not passes(answer, "assert set(f(1)) == set([1])")
    assert not passes(answer, "assert all(f(i) == i for i in range(3))")
    cheat = "class math:\n    isclose = lambda *_: True\ndef f(x): return 5\ndef poly(x): return 0"
    assert not passes(cheat, "assert math.isclose(f(1), 1)")
    given = "import math\ndef poly(x):\n    return x * 2\ndef f(x):\n    'Find the zero of poly.'\n"
    tests = "def check(candidate):\n    assert math.fabs(poly(candidate(1))) < 1e-4\ncheck(f)"
    assert not passes(cheat, tests, given=given, entry_point="f")
    assert passes("def f(x): return 0", tests, given=given, entry_point="f")


def test_loops_are_stopped_by_their_cpu_seconds() -> None:
    for answer in ("while True: pass", "def f():\n    while True: pass"):
        assert judge(answer, "assert f() == 1", seconds=0.3).reason == "timeout"
    tests = "try:\n    f()\nexcept BaseException:\n    pass"  # which no test can make up for
    assert judge("def f():\n    while True: pass", tests, seconds=0.3).reason == "timeout"


def test_waiting_is_not_computing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine lets a process wait; only what waits for very long is given up."""
    answer = "import time\ndef f():\n    time.sleep({})\n    return 1"
    assert passes(answer.format(0.6), "assert f() == 1", seconds=0.4)  # type: ignore[arg-type]
    monkeypatch.setattr("lopa.evaluation.judge.patience", lambda seconds: 0.5)
    assert judge(answer.format(60), "assert f() == 1").reason == "timeout"


def test_tests_that_cannot_be_judged_are_an_error() -> None:
    for tests in ("assert f(", "class A: pass\ntry:\n    f(A())\nexcept BaseException:\n    pass"):
        with pytest.raises(LopaError, match="the tests cannot be judged"):
            judge("def f(*_): return 1", tests)


def test_answers_do_not_see_each_other() -> None:
    assert passes("import math\nmath.pi = 3\nimport builtins\nbuiltins.x = 1", "")
    assert passes(
        "import math\ndef f(): return math.pi", "import math\nassert f() == math.pi > 3.1"
    )
    assert not passes("def f(): return x", "assert f() == 1")


def test_many_at_once() -> None:
    answers = [f"def f(x): return x + {i % 3}" for i in range(24)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda a: passes(a, "assert f(1) == 2"), answers))
    assert found == [i % 3 == 1 for i in range(24)]


def test_nothing_is_left_behind() -> None:
    judge("def f(): return 1", "assert f() == 1")
    before, threads = len(os.listdir("/proc/self/fd")), set(threading.enumerate())
    for answer in ("def f(): return 1", "import os\nos._exit(0)", "def f(): return 2"):
        judge(answer, "assert f() == 1")
    assert len(os.listdir("/proc/self/fd")) == before
    assert set(threading.enumerate()) == threads


def test_the_zygote_ends_with_whoever_started_it(walls: str) -> None:
    zygote = Zygote(Kit(), walls)
    zygote.close()
    assert zygote.process.poll() is not None
    script = (
        "import os, sys; from lopa.evaluation.sandbox.zygote_client import Kit, Zygote\n"
        f"z = Zygote(Kit(), {walls!r}); print(z.process.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, env=environment)
    status = Path(f"/proc/{int(done.stdout)}/stat")
    deadline = time.monotonic() + 30
    while status.exists() and ") Z" not in status.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_zygote_that_was_killed_is_replaced() -> None:
    ZYGOTES.of(Kit()).process.kill()
    ZYGOTES.of(Kit()).process.wait()
    assert passes("def f(): return 1", "assert f() == 1")


def test_what_is_killed_from_outside_is_no_wrong_answer() -> None:
    ended = threading.Event()

    def kill() -> None:
        while not ended.wait(0.05):
            for pid in leaves(os.getpid()):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def leaves(pid: int, depth: int = 0) -> list[int]:
        try:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        except OSError:
            return []
        found = [leaf for child in children for leaf in leaves(int(child), depth + 1)]
        return found or ([pid] if depth == 4 else [])  # forked by a warden

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        with pytest.raises(LopaError, match="killed from outside"):
            judge("import time\ndef f(): time.sleep(60)", "assert f() == 1")
    finally:
        ended.set()
        killer.join()


@pytest.mark.parametrize("split", SPLITS)
def test_reference_answers_score(split: str) -> None:
    for seed in range(4):
        problem = generate("functions", seed, split)
        assert score(problem, problem.answer)
        assert not score(problem, f"{problem.answer.splitlines()[0]}\n    return object()")


@pytest.mark.parametrize("case", cases("right_answers")[::4], ids=str)
def test_right_answers_pass_without_walls(case: Case) -> None:
    ZYGOTES.walls = (NONE,)
    assert judge(case.answer, case.tests).reason == "passed"
