"""What does each choice add: where to look ahead, which branch wins, where not to look?"""

from __future__ import annotations

from typing import Any

from lopa.config import PAPER
from lopa.evaluation import plots
from lopa.evaluation.sample import figures
from lopa.studies.study import Findings, Setting, Study, Table
from lopa.studies.wording import accuracy, points, share, times

PLAIN, PUBLISHED, NO_END = "no lookahead", "LoPA, as published", "LoPA, not at an end of text"
LAST = "least confident positions"


def run(study: Study) -> Findings:
    samples = study.decode(
        [
            Setting(PLAIN, {**PAPER, "branches": 0}),
            Setting("random winner", PAPER, "random winner", study.seed),
            Setting("random positions", PAPER, "random positions", study.seed),
            Setting(LAST, PAPER, LAST),
            Setting(PUBLISHED, PAPER),
            Setting(NO_END, {**PAPER, "lookahead_eos": False}),
        ]
    )
    return {
        "branches": study.config().branches,
        "variants": {name: figures(some) for name, some in samples.items()},
    }


def table(findings: Findings) -> Table:
    heads = ("variant", "accuracy", "TPF", "× no lookahead")
    plain = findings["variants"][PLAIN]["tpf"]
    return heads, [
        (name, accuracy(f), f"{f['tpf']:.2f}", f"{f['tpf'] / plain:.2f}")
        for name, f in findings["variants"].items()
    ]


def reading(findings: Findings) -> str:
    found = findings["variants"]
    tpf = {name: f["tpf"] for name, f in found.items()}
    right = {name: f["accuracy"] for name, f in found.items()}
    added = tpf[PUBLISHED] - tpf[PLAIN]
    winner, positions = (
        share(tpf[name] - tpf[PLAIN], added) for name in ("random winner", "random positions")
    )
    return (
        f"Of what k = {findings['branches']} adds to the TPF of plain D2F, {winner} are left "
        "when the "
        f"winner is drawn by lot ({points(right['random winner'], right[PUBLISHED])} of "
        "accuracy) and "
        f"{positions} when the positions are "
        f"({points(right['random positions'], right[PUBLISHED])}). "
        "Looking ahead where the model is least confident brings "
        f"{times(tpf[LAST], tpf[PUBLISHED])} the "
        f"published TPF and {points(right[LAST], right[PUBLISHED])} of accuracy: the most "
        "telling positions "
        "are the ones that it gets wrong. Without lookaheads that end the text: "
        f"{times(tpf[NO_END], tpf[PUBLISHED])} the published TPF, "
        f"{points(right[NO_END], right[PUBLISHED])} of accuracy."
    )


def draw(findings: Findings) -> Any:
    figure, (left, right) = plots.require_plots().subplots(1, 2, figsize=(11, 3.6), sharey=True)
    names = list(findings["variants"])
    found = list(findings["variants"].values())
    left.barh(names, [f["tpf"] for f in found])
    left.set_xlabel("tokens per forward")
    values, reach = plots.accuracies(found)
    right.errorbar(values, names, xerr=reach, fmt="o", capsize=3)
    right.set_xlabel("accuracy, %")
    left.invert_yaxis()
    return figure
