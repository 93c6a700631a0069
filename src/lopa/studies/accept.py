"""What does lookahead cost in accuracy, and what does it bring, by the way a branch is accepted?

Every way against D2F on the same problems: the difference of accuracies is paired, so that it is
known better than either of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from lopa.config import USUAL
from lopa.evaluation import plots
from lopa.evaluation.sample import Sample, figures
from lopa.presets import PAPER
from lopa.studies.study import Findings, Setting, Study, Table
from lopa.studies.wording import accuracy, times

D2F, SHOWN = "D2F", "agreed, k = 7"
ARMS: dict[str, dict[str, Any]] = {
    D2F: {**PAPER, "branches": 0},
    "published, k = 7": {**PAPER, "branches": 7},
    "score, k = 7": {"accept": "score", "branches": 7},
    "agreed, not merged, k = 7": {**USUAL, "merge": False, "branches": 7},
    SHOWN: {**USUAL, "branches": 7},
    "agreed, k = 15": {**USUAL, "branches": 15},
}
Z95 = 1.96  # of a normal interval


def run(study: Study) -> Findings:
    return compare(study, ARMS)


def compare(study: Study, arms: dict[str, dict[str, Any]]) -> Findings:
    samples = study.decode([Setting(name, options) for name, options in arms.items()])
    base = _ordered(samples[D2F])
    return {
        "arms": {
            name: {**figures(some), **_paired(_ordered(some), base)}
            for name, some in samples.items()
        }
    }


def _ordered(samples: Sequence[Sample]) -> list[Sample]:
    return sorted(samples, key=lambda sample: sample.problem)


def _paired(samples: Sequence[Sample], base: Sequence[Sample]) -> Findings:
    """The difference of accuracies with its interval, and answers that are the same."""
    both = list(zip(samples, base, strict=True))
    steps = [int(one.correct) - int(other.correct) for one, other in both]
    mean = sum(steps) / len(steps)
    spread = math.sqrt(sum((step - mean) ** 2 for step in steps)) / len(steps)
    return {
        "difference": mean,
        "difference_interval": [mean - Z95 * spread, mean + Z95 * spread],
        "same_answers": sum(one.text == other.text for one, other in both) / len(both),
    }


def table(findings: Findings) -> Table:
    heads = ("decoding", "accuracy", "− D2F, points", "TPF", "× D2F", "same answers")
    plain = findings["arms"][D2F]["tpf"]
    rows = []
    for name, found in findings["arms"].items():
        low, high = (100 * x for x in found["difference_interval"])
        rows.append(
            (
                name,
                accuracy(found),
                f"{100 * found['difference']:+.1f} ({low:+.1f} … {high:+.1f})",
                f"{found['tpf']:.2f}",
                f"{found['tpf'] / plain:.2f}",
                f"{found['same_answers']:.1%}",
            )
        )
    return heads, rows


def reading(findings: Findings) -> str:
    arms = findings["arms"]
    if SHOWN not in arms:
        return "Not measured."
    low, high = (100 * x for x in arms[SHOWN]["difference_interval"])
    return (
        f"{SHOWN}: {times(arms[SHOWN]['tpf'], arms[D2F]['tpf'])} D2F's TPF, accuracy "
        f"{100 * arms[SHOWN]['difference']:+.1f} points ({low:+.1f} … {high:+.1f})."
    )


def plot(findings: Findings) -> Any:
    figure, part = plots.require_plots().subplots(figsize=(7, 4.2))
    for name, found in findings["arms"].items():
        values, reach = plots.accuracies([found])
        part.errorbar([found["tpf"]], values, yerr=reach, fmt="o", capsize=3, label=name)
    part.set_xlabel("tokens per forward")
    part.set_ylabel("accuracy, %")
    part.grid(alpha=0.3)
    part.legend(**plots.LEGEND)
    return figure
