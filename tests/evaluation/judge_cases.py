"""Answers for the judge, from the files in `cases`.

A case begins with `=== name`. The answer follows, and after `---` its tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


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
