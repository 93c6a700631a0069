"""How do tokens per forward and accuracy depend on the number of branches?"""

from __future__ import annotations

from typing import Any

from lopa.evaluation import plots
from lopa.evaluation.sample import figures, mean_by_round
from lopa.evaluation.sweep import curves
from lopa.studies.study import Findings, Study, Table

BRANCHES: tuple[Any, ...] = (0, 1, 3, 7, "auto")


def answers(study: Study) -> int:
    return len(BRANCHES) * len(study.problems)


def run(study: Study) -> Findings:
    points = []
    for k in BRANCHES:
        samples = study.decode(f"branches={k}", study.config(branches=k))
        found = figures(samples)
        points.append({"options": {"branches": k}, **found, "by_round": mean_by_round(samples)})
    axes = {"branches": list(BRANCHES)}
    return {"task": "branches", "axes": axes, "points": points, "curves": curves(points)}


def table(findings: Findings) -> Table:
    heads = ("branches", "tried a round", "accuracy", "TPF", "tokens/s")
    return heads, [
        (
            str(p["options"]["branches"]),
            f"{p['branches']:.1f}",
            f"{p['accuracy']:.0%} ({p['interval'][0]:.0%} … {p['interval'][1]:.0%})",
            f"{p['tpf']:.2f}",
            f"{p['tokens_per_second']:.1f}",
        )
        for p in findings["points"]
    ]


def draw(findings: Findings) -> Any:
    return plots.by_axis(findings)
