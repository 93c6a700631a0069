"""The judge's tests under other versions of Python and other users.

As whoever runs this; where that is root also as an ordinary user; and as root of a user namespace.
Versions that are not here are left out, and said so. With LOPA_JUDGE_SHARE=3 each version and each
user has one turn.
"""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

pytestmark = pytest.mark.judge

ROOT = Path(__file__).parent.parent.parent
TESTS = ("test_judge.py", "test_escapes.py", "test_forgeries.py")
NEEDED = ("pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments")
VERSIONS = ("3.11", "3.12", "3.13")
USERS = ("self", "user", "namespace")
SHARE = int(os.environ.get("LOPA_JUDGE_SHARE", "1"))  # one of so many pairs is tried
NOBODY = 65534
FIND = "import sys; print(sys.base_prefix)"
OPTIONS = ("--noconftest", "-o", "addopts=", "-p", "no:cacheprovider", "-q")


@cache
def pyenv() -> dict[str, str]:
    """With it, a version is found by its name only if it is asked for."""
    if shutil.which("pyenv") is None:
        return {}
    versions = subprocess.run(["pyenv", "versions", "--bare"], capture_output=True, text=True)
    return {"PYENV_VERSION": ":".join(versions.stdout.split())}


@cache
def prefix(version: str) -> Path | None:
    """Where Python of this version is installed."""
    if sys.version_info[:2] == tuple(map(int, version.split("."))):
        return Path(sys.base_prefix)
    program = shutil.which(f"python{version}")
    if program is None:
        return None
    command = [program, "-I", "-c", FIND]
    found = subprocess.run(command, capture_output=True, text=True, env=os.environ | pyenv())
    return Path(found.stdout.strip()) if found.returncode == 0 else None


@pytest.fixture(scope="module")
def everyone_s() -> Iterator[Path]:
    """A folder that every user can read, with the package, these tests, and pytest."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        no_caches = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "src", folder / "src", ignore=no_caches)
        shutil.copytree(ROOT / "tests" / "evaluation", folder / "tests", ignore=no_caches)
        (folder / "site").mkdir()
        for module in NEEDED:
            source = Path(importlib.import_module(module).__file__ or "")
            if source.name == "__init__.py":
                shutil.copytree(source.parent, folder / "site" / module, ignore=no_caches)
            else:
                shutil.copy(source, folder / "site")
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        yield folder


def installed(version: str, folder: Path) -> Path:
    """Python of this version, copied to where everyone can read it."""
    place = prefix(version)
    if place is None:
        pytest.skip(f"no Python {version} here")
    copy = folder / version
    if not copy.exists():
        library = f"lib/python{version}"
        left_out = shutil.ignore_patterns("test", "tests", "site-packages", "idlelib", "config-*")
        (copy / "bin").mkdir(parents=True)
        shutil.copytree(place / library, copy / library, ignore=left_out, symlinks=True)
        program = place / "bin" / f"python{version}"
        shutil.copy(program, copy / "bin" / f"python{version}")
        for shared in (place / "lib").glob("libpython*.so*"):
            shutil.copy(shared, copy / "lib")
    return copy


def pairs() -> list[tuple[str, str]]:
    numbered = product(enumerate(VERSIONS), enumerate(USERS))
    return [(version, who) for (i, version), (j, who) in numbered if (j - i) % SHARE == 0]


@pytest.mark.parametrize(("version", "who"), pairs())
def test_the_judge(version: str, who: str, everyone_s: Path) -> None:
    place = installed(version, everyone_s)
    prelude: Sequence[str] = ()
    identity: dict[str, object] = {}
    if who == "user":
        if os.geteuid() != 0:
            pytest.skip("this is an ordinary user already")
        identity = {"user": NOBODY, "group": NOBODY, "extra_groups": ()}
    elif who == "namespace":
        if shutil.which("unshare") is None:
            pytest.skip("no unshare here")
        prelude = ("unshare", "-Ur")
    done = subprocess.run(
        [
            *(*prelude, str(place / "bin" / f"python{version}"), "-B", "-m", "pytest", *OPTIONS),
            *(str(everyone_s / "tests" / name) for name in TESTS),
        ],
        cwd=everyone_s,
        env={
            "PATH": os.environ["PATH"],
            "LD_LIBRARY_PATH": str(place / "lib"),
            "PYTHONPATH": os.pathsep.join(str(everyone_s / n) for n in ("src", "site", "tests")),
        },
        capture_output=True,
        text=True,
        **identity,  # type: ignore[call-overload]
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
