"""How much depends on the filling order? Many random orders of each problem, and ours among them.

In a random order every round first places the token of a randomly chosen mask, then fills what
passes the threshold: what a single lookahead branch does that always wins.
"""

from __future__ import annotations

from typing import Any

from lopa.evaluation import plots
from lopa.evaluation.sample import Sample, figures
from lopa.presets import PAPER
from lopa.studies.study import Findings, Setting, Study, Table
from lopa.studies.wording import accuracy

ORDERS = 100
OURS = ("D2F", "LoPA, published", "LoPA, no EOS lookahead")


def run(study: Study) -> Findings:
    chance = {**PAPER, "branches": 1}
    ours = [
        Setting(OURS[0], {**PAPER, "branches": 0}),
        Setting(OURS[1], PAPER),
        Setting(OURS[2], {**PAPER, "lookahead_eos": False}),
    ]
    orders = [Setting(f"order {n}", chance, "random order", study.seed + n) for n in range(ORDERS)]
    samples = study.decode([*ours, *orders])
    problems = []
    for index in range(len(study.problems)):
        random = [samples[setting.name][index] for setting in orders]
        speeds = sorted(map(_tpf, random))
        found: Findings = {
            "random_tpf": speeds,
            "random_accuracy": sum(s.correct for s in random) / ORDERS,
        }
        for name in OURS:
            own = _tpf(samples[name][index])
            share = sum(t < own for t in speeds) / ORDERS
            found[name] = {"tpf": own, "faster_than": share}
        problems.append(found)
    return {
        "orders": ORDERS,
        "problems": problems,
        "random": figures([s for setting in orders for s in samples[setting.name]]),
        **{name: figures(samples[name]) for name in OURS},
    }


def table(findings: Findings) -> Table:
    heads = ("order", "accuracy", "TPF", "faster than random orders")
    random = findings["random"]  # no interval: its answers are not of as many problems
    rows = [
        ("random, slowest of each problem", "", f"{_mean(findings, 0):.2f}", ""),
        ("random, all", f"{random['accuracy']:.1%}", f"{random['tpf']:.2f}", ""),
        ("random, fastest of each problem", "", f"{_mean(findings, -1):.2f}", ""),
    ]
    for name in OURS:
        f = findings[name]
        rows.append((name, accuracy(f), f"{f['tpf']:.2f}", f"{_faster(findings, name):.0%}"))
    return heads, rows


def reading(findings: Findings) -> str:
    spread = [p["random_tpf"][-1] / p["random_tpf"][0] for p in findings["problems"]]
    return (
        f"The fastest of {findings['orders']} random orders of a problem has "
        f"{sum(spread) / len(spread):.1f} times the TPF of the slowest. {OURS[1]}, is faster than "
        f"{_faster(findings, OURS[1]):.0%} of them."
    )


def plot(findings: Findings) -> Any:
    figure, part = plots.require_plots().subplots(figsize=(9, 4.4))
    problems = sorted(
        findings["problems"], key=lambda p: p["random_tpf"][len(p["random_tpf"]) // 2]
    )
    places = list(range(1, len(problems) + 1))
    low = [p["random_tpf"][0] for p in problems]
    high = [p["random_tpf"][-1] for p in problems]
    middle = [p["random_tpf"][len(p["random_tpf"]) // 2] for p in problems]
    part.vlines(places, low, high, color="0.8", linewidth=3)
    part.plot(places, middle, "_", color="0.4", label="random orders: median, least, most")
    for name, mark in zip(OURS, ("v", "o", "^"), strict=True):
        part.plot(places, [p[name]["tpf"] for p in problems], mark, markersize=4, label=name)
    part.set_xlabel(f"problem, by the median of its {findings['orders']} random orders")
    part.set_ylabel("tokens per forward")
    part.legend(**plots.LEGEND | {"loc": "upper left"})
    part.grid(alpha=0.3)
    return figure


def _tpf(sample: Sample) -> float:
    return sample.tokens / sample.rounds


def _mean(findings: Findings, place: int) -> float:
    found = [p["random_tpf"][place] for p in findings["problems"]]
    return float(sum(found) / len(found))


def _faster(findings: Findings, name: str) -> float:
    found = [p[name]["faster_than"] for p in findings["problems"]]
    return float(sum(found) / len(found))
