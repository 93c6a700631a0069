"""How many rounds does `accept="exact"` save, and are the answers those of no branches?"""

from __future__ import annotations

from typing import Any

from lopa.presets import PAPER
from lopa.studies.accept import D2F, compare, plot, table
from lopa.studies.study import Findings, Study
from lopa.studies.wording import times

__all__ = ["plot", "reading", "run", "table"]

ARMS: dict[str, dict[str, Any]] = {
    D2F: {**PAPER, "branches": 0},
    **{f"exact, k = {k}": {"accept": "exact", "branches": k} for k in (1, 3, 7, 15)},
    "exact, auto": {"accept": "exact", "branches": "auto", "objective": "tpf"},
}


def run(study: Study) -> Findings:
    return compare(study, ARMS)


def reading(findings: Findings) -> str:
    arms = findings["arms"]
    most = max(arms, key=lambda name: arms[name]["tpf"])
    differ = [name for name, found in arms.items() if found["same_answers"] < 1]
    same = f"Answers differ with {', '.join(differ)}." if differ else "All answers are the same."
    return f"{same} {most}: {times(arms[most]['tpf'], arms[D2F]['tpf'])} D2F's TPF."
