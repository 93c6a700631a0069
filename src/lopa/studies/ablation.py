"""What does each choice add: where to look ahead, which branch wins, where not to look?"""

from __future__ import annotations

from typing import Any

from lopa.config import USUAL
from lopa.evaluation import plots
from lopa.evaluation.sample import figures
from lopa.presets import PAPER
from lopa.studies.study import Findings, Setting, Study, Table
from lopa.studies.wording import accuracy, points, share

PLAIN, PUBLISHED, NO_EOS = "no lookahead", "LoPA, published", "LoPA, no EOS lookahead"
WINNER, POSITIONS = "random winner", "random positions"
LAST = "least confident positions"
SCORE, AGREED, DEFAULT = "LoPA, score fills", "LoPA, agreed", "LoPA, agreed and merged"


def run(study: Study) -> Findings:
    samples = study.decode(
        [
            Setting(PLAIN, {**PAPER, "branches": 0}),
            Setting(WINNER, PAPER, WINNER, study.seed),
            Setting(POSITIONS, PAPER, POSITIONS, study.seed),
            Setting(LAST, PAPER, LAST),
            Setting(PUBLISHED, PAPER),
            Setting(NO_EOS, {**PAPER, "lookahead_eos": False}),
            Setting(SCORE, {"accept": "score"}),
            Setting(AGREED, {**USUAL, "merge": False}),
            Setting(DEFAULT, USUAL),
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
    plain, published = found[PLAIN], found[PUBLISHED]
    kept = share(found[WINNER]["tpf"] - plain["tpf"], published["tpf"] - plain["tpf"])
    lost = points(found[POSITIONS]["accuracy"], published["accuracy"])
    return (
        f"A random winner keeps {kept} of the TPF that {findings['branches']} branches add. "
        f"Random positions change accuracy by {lost}."
    )


def plot(findings: Findings) -> Any:
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
