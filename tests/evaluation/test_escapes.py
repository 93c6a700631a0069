"""Answers that reach for the machine: they get nothing, and leave nothing behind.

Without walls most of the attempts succeed, which shows that they are attempts.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from judge_cases import Case, behind, cases, missing

import lopa
from lopa.evaluation.judge import judge
from lopa.evaluation.sandbox.walls import LANDLOCK, NAMESPACES, NONE
from lopa.evaluation.sandbox.zygote_client import ZYGOTES

ESCAPES = cases("escapes")
# What else may keep an attempt from success where there are no walls: no such module, or no right.
NOT_EVERYWHERE = {
    "readline truncates a file",
    "sqlite writes a file",
    "the parent's environment",
    "a new user namespace",
    "packages of the site",
    "list processes",
    "shared memory",
    "keys of the kernel",
}
RUN = """
def run():
    try:
        attempt()
    except BaseException as error:
        return type(error).__name__
    return "escaped"
"""


class Machine:
    """What there is to reach for, and whether it is as it was."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.chmod(0o777)
        self.kept = folder / "kept"
        self.kept.write_text("kept")
        self.kept.chmod(0o666)
        os.utime(self.kept, (1, 1))
        self.process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.socket.setblocking(False)

    def facts(self) -> str:
        package = str(Path(lopa.__file__).parent.parent)
        facts = {"PLACE": str(self.folder), "PID": self.process.pid, "SOURCE": package}
        facts["PORT"] = self.socket.getsockname()[1]
        return "".join(f"{name} = {value!r}\n" for name, value in facts.items())

    def check(self) -> None:
        assert [entry.name for entry in self.folder.iterdir()] == ["kept"]
        assert self.kept.read_text() == "kept"
        assert self.kept.stat().st_mode & 0o777 == 0o666
        assert self.kept.stat().st_mtime == 1
        assert self.process.poll() is None
        with pytest.raises(BlockingIOError):
            self.socket.accept()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.socket.close()


@pytest.fixture
def machine() -> Iterator[Machine]:
    with tempfile.TemporaryDirectory() as folder:
        machine = Machine(Path(folder))
        yield machine
        machine.close()


@pytest.fixture
def walls(request: pytest.FixtureRequest) -> Iterator[None]:
    with behind(request.param):
        yield


def escapes(case: Case, machine: Machine) -> bool:
    return judge(
        f"{machine.facts()}{case.answer}\n{RUN}", "assert run() == 'escaped'", seconds=10
    ).passed


@pytest.mark.parametrize("walls", [NAMESPACES, LANDLOCK], indirect=True)
def test_nothing_gets_out(walls: None, machine: Machine) -> None:
    """All of them in a row: the processes that serve are the same afterwards."""
    assert judge("def f(): return 1", "assert f() == 1").passed
    before = set(map(id, ZYGOTES._kept.values()))
    for case in ESCAPES:
        assert not escapes(case, machine), case
        machine.check()
    assert judge("def f(): return 1", "assert f() == 1").passed
    assert set(map(id, ZYGOTES._kept.values())) == before
    assert len(ESCAPES) >= 48


@pytest.mark.parametrize("walls", [NONE], indirect=True)
@pytest.mark.parametrize(
    "case",
    [c for c in ESCAPES if not c.answer.startswith("#") and c.name not in NOT_EVERYWHERE],
    ids=str,
)
def test_without_walls_the_attempts_succeed(walls: None, case: Case, machine: Machine) -> None:
    assert escapes(case, machine)


REFUSED = """
import sys
from lopa.errors import LopaError
from lopa.evaluation.judge import judge
from lopa.evaluation.sandbox import kernel, seccomp
from lopa.evaluation.sandbox.zygote_client import ZYGOTES, Kit
kernel.call("prctl", 38, 1, 0, 0, 0)
numbers = {"unshare": (272, 97)[kernel.machine()[1]], "landlock_create_ruleset": 444}
rules = [(0x15, 0, 1, numbers[name]) for name in sys.argv[1:]]
program = [step for rule in rules for step in (rule, (0x06, 0, 0, 0x50001))]
seccomp.install([(0x20, 0, 0, 0), *program, (0x06, 0, 0, 0x7FFF0000)])
try:
    print(judge("def f(): return 1", "assert f() == 1").reason, ZYGOTES.of(Kit()).walls)
except LopaError as error:
    print(error)
"""


def test_what_a_container_refuses() -> None:
    """Landlock takes the place of namespaces; where there is neither, code is not run."""

    def judged(*refused: str) -> str:
        command = [sys.executable, "-c", REFUSED, *refused]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        return done.stdout.strip() or done.stderr

    if missing(NAMESPACES) or missing(LANDLOCK):
        pytest.skip("this machine refuses it already")
    assert judged() == "passed namespaces"
    assert judged("landlock_create_ruleset") == "passed namespaces"
    assert judged("unshare") == "passed landlock"
    said = judged("unshare", "landlock_create_ruleset")
    assert "generated code is not run" in said
    assert "user namespaces (" in said
    assert "Landlock (" in said
    assert "--unsafe-code" in said
    assert len(said.splitlines()) == 1
