"""Answers for the judge, from the files in `cases`.

A case begins with `=== name`. The answer follows, and after `---` its tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from lopa.evaluation.sandbox.zygote_client import ZYGOTES, Kit, MissingWallsError, Zygote


@dataclass(frozen=True)
class Case:
    name: str
    answer: str
    tests: str

    def __str__(self) -> str:
        return self.name


def cases(name: str) -> list[Case]:
    text = (Path(__file__).parent / "cases" / f"{name}.txt").read_text(encoding="utf-8")
    found = []
    for block in text.split("\n=== ")[1:]:
        title, _, rest = block.partition("\n")
        answer, _, tests = rest.partition("\n---\n")
        found.append(Case(title, answer, tests))
    return found


@cache
def missing(walls: str) -> str:
    """What this machine lacks for them, if anything."""
    try:
        Zygote(Kit(), walls).close()
    except MissingWallsError as error:
        return str(error)
    return ""


@contextmanager
def behind(walls: str) -> Iterator[None]:
    """Judge code behind these walls alone; a test that needs others is skipped."""
    if missing(walls):
        pytest.skip(f"not allowed on this machine: {missing(walls)}")
    before = ZYGOTES.walls
    ZYGOTES.walls = (walls,)
    try:
        yield
    finally:
        ZYGOTES.walls = before
