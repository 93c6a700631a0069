"""How do tokens per forward and accuracy depend on the number of branches?

Under the published rules, by the score of default lookahead alone, and by agreement, the default.
"""

from __future__ import annotations

from typing import Any

from lopa.config import USUAL
from lopa.evaluation import plots
from lopa.evaluation.sample import figures, mean_by_round
from lopa.evaluation.sweep import curves
from lopa.presets import PAPER
from lopa.studies.study import Findings, Setting, Study, Table
from lopa.studies.wording import accuracy, times

BRANCHES = (0, 1, 3, 7, 15)
SHOWN = 7  # in the reading
KINDS: dict[str, dict[str, Any]] = {
    "published": PAPER,
    "score": {"accept": "score"},
    "default": USUAL,
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
    heads = ("lookahead", "branches", "branches per round", "accuracy", "TPF")
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
    by = {tuple(p["options"].values()): p["tpf"] for p in findings["points"]}
    plain = by[0, next(iter(KINDS))]
    said = [f"{kind}: {times(by[SHOWN, kind], plain)}" for kind in KINDS if (SHOWN, kind) in by]
    return f"TPF of k = {SHOWN} against D2F's. {'; '.join(said) or 'Not measured'}."


def plot(findings: Findings) -> Any:
    return plots.by_axis(findings)
