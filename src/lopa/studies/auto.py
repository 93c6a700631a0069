"""Does `auto` trade accuracy for tokens per forward better than a fixed k?

One curve along the threshold for each fixed k under the published rules and under the default
ones, and one for auto under the default rules. The AUP of a curve is its score.
"""

from __future__ import annotations

from typing import Any

from lopa.config import USUAL
from lopa.evaluation import plots
from lopa.evaluation.sample import figures
from lopa.evaluation.sweep import curves, of_curve
from lopa.presets import PAPER
from lopa.studies.study import Findings, Setting, Study, Table
from lopa.studies.wording import accuracy, times

THRESHOLDS = (0.95, 0.9, 0.85, 0.8)
FIXED = (7, 14, 31)
DEFAULT = (7, 15, 31)
AUTO_DEFAULT = "auto, default"
AUTO = {"branches": "auto", "objective": "tpf"}  # forwards are what AUP counts
ARMS: dict[str, dict[str, Any]] = {
    "D2F": {**PAPER, "branches": 0},
    **{f"k = {k}, published": {**PAPER, "branches": k} for k in FIXED},
    **{f"k = {k}, default": {**USUAL, "branches": k} for k in DEFAULT},
    AUTO_DEFAULT: {**USUAL, **AUTO},
}


def run(study: Study) -> Findings:
    settings = {
        (arm, threshold): Setting(f"{arm}, τ {threshold:g}", {**options, "threshold": threshold})
        for arm, options in ARMS.items()
        for threshold in THRESHOLDS
    }
    samples = study.decode(list(settings.values()))
    found = [
        {
            "options": {"threshold": threshold, "decoding": arm},
            **figures(samples[setting.name]),
        }
        for (arm, threshold), setting in settings.items()
        if setting.name in samples
    ]
    # A shorter curve has less area for that alone: compared are the thresholds that all curves
    # have; one point is no curve.
    by_arm = {arm: [p for p in found if p["options"]["decoding"] == arm] for arm in ARMS}
    kept = {arm: points for arm, points in by_arm.items() if len(points) > 1}
    common = set.intersection(*({p["options"]["threshold"] for p in k} for k in kept.values()))
    compared = [
        p for points in kept.values() for p in points if p["options"]["threshold"] in common
    ]
    return {
        "task": "auto",
        "axes": {"threshold": list(THRESHOLDS), "decoding": list(kept)},
        "points": found,
        "compared": sorted(common, reverse=True),
        "curves": curves(compared),
    }


def table(findings: Findings) -> Table:
    heads = ("decoding", "AUP", *(f"τ {t:g}: accuracy, TPF" for t in THRESHOLDS))
    rows = []
    for curve in findings["curves"]:
        points = {p["options"]["threshold"]: p for p in of_curve(findings, curve)}
        rows.append(
            (
                curve["shared"]["decoding"],
                f"{curve['aup']:.0f}",
                *(
                    f"{accuracy(points[t])}, {points[t]['tpf']:.2f}"
                    if t in points
                    else "not measured"
                    for t in THRESHOLDS
                ),
            )
        )
    return heads, rows


def best_fixed(findings: Findings) -> str:
    by = _by_arm(findings)
    published = [name for name in by if ARMS[name] == {**PAPER, "branches": ARMS[name]["branches"]}]
    fixed = [name for name in published if isinstance(ARMS[name]["branches"], int)]
    return max(fixed, key=by.__getitem__)


def reading(findings: Findings) -> str:
    by = _by_arm(findings)
    best = best_fixed(findings)
    said = (
        f"{AUTO_DEFAULT}: {by[AUTO_DEFAULT]:.0f}, {times(by[AUTO_DEFAULT], by[best])} that"
        if AUTO_DEFAULT in by
        else "auto was not measured"
    )
    return f"Best fixed number: {best}, with an AUP of {by[best]:.0f}. {said}."


def _by_arm(findings: Findings) -> dict[str, float]:
    return {c["shared"]["decoding"]: c["aup"] for c in findings["curves"]}


def plot(findings: Findings) -> Any:
    return plots.tradeoff(findings)
