"""How do tokens per forward and accuracy depend on the number of branches?

As published; without lookaheads that end the text; and as it is by default.
"""

from __future__ import annotations

from typing import Any

from lopa.config import PAPER, USUAL
from lopa.evaluation import plots
from lopa.evaluation.sample import figures, mean_by_round
from lopa.evaluation.sweep import curves
from lopa.studies.study import Findings, Setting, Study, Table
from lopa.studies.wording import accuracy, points, times

BRANCHES = (0, 1, 3, 7, 14)
KINDS: dict[str, dict[str, Any]] = {
    "as published": PAPER,
    "not at an end of text": {**PAPER, "lookahead_eos": False},
    "by default": USUAL,  # so, and with another score
}


def run(study: Study) -> Findings:
    settings = {
        (kind, k): Setting(f"{kind}, k = {k}", {**(options if k else PAPER), "branches": k})
        for kind, options in KINDS.items()
        for k in BRANCHES
    }
    samples = study.decode(list(settings.values()))
    found = []
    for (kind, k), setting in settings.items():
        some = samples.get(setting.name)
        if not some:  # a report of what is there
            continue
        options = {"branches": k, "lookahead": kind}
        found.append({"options": options, **figures(some), "by_round": mean_by_round(some)})
    axes = {"branches": list(BRANCHES), "lookahead": list(KINDS)}
    return {"task": "branches", "axes": axes, "points": found, "curves": curves(found)}


def table(findings: Findings) -> Table:
    heads = ("lookahead", "branches", "tried a round", "accuracy", "TPF")
    return heads, [
        (
            p["options"]["lookahead"] if p["options"]["branches"] else "none",
            str(p["options"]["branches"]),
            f"{p['branches']:.1f}",
            accuracy(p),
            f"{p['tpf']:.2f}",
        )
        for p in findings["points"]
        if p["options"]["branches"] or p["options"]["lookahead"] == next(iter(KINDS))
    ]


def reading(findings: Findings) -> str:
    by = {tuple(p["options"].values()): p for p in findings["points"]}
    plain = by[0, next(iter(KINDS))]
    said = [
        f"{kind}: "
        + "; ".join(
            f"k = {k} {times(by[k, kind]['tpf'], plain['tpf'])} "
            f"({points(by[k, kind]['accuracy'], plain['accuracy'])})"
            for k in BRANCHES[1:]
            if (k, kind) in by
        )
        for kind in KINDS
        if any((k, kind) in by for k in BRANCHES[1:])
    ]
    return (
        f"Times the TPF of plain D2F, {plain['tpf']:.2f}, and points of accuracy against it. "
        + " ".join(f"{line[0].upper()}{line[1:]}." for line in said)
    )


def draw(findings: Findings) -> Any:
    return plots.by_axis(findings)
