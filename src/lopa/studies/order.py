"""How much does the filling order decide? Many random orders of each problem, and ours among them.

A random order places the token of a mask drawn by lot ahead of its turn in every round, and then
fills what passes the threshold: what a single lookahead branch does that always wins.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from lopa.evaluation import plots
from lopa.evaluation.sample import Sample, figures
from lopa.studies.study import Findings, Study, Table
from lopa.studies.variants import RandomOrder

ORDERS = 100


def answers(study: Study) -> int:
    return (ORDERS + 2) * len(study.problems)


def run(study: Study) -> Findings:
    ours = {
        "D2F": study.decode("D2F", study.config(branches=0)),
        "LoPA": study.decode("LoPA", study.config()),
    }
    config = study.config(branches=1)
    problems: list[Findings] = []
    everything: list[Sample] = []
    for index in range(len(study.problems)):
        orders = [
            study.answer("random", index, config, partial(RandomOrder, seed=study.seed + n))
            for n in range(ORDERS)
        ]
        everything += orders
        tpf = sorted(s.tokens / s.rounds for s in orders)
        found: Findings = {
            "random_tpf": tpf,
            "random_accuracy": sum(s.correct for s in orders) / ORDERS,
        }
        for name, samples in ours.items():
            own = samples[index].tokens / samples[index].rounds
            found[name] = {"tpf": own, "faster_than": sum(t < own for t in tpf) / ORDERS}
        problems.append(found)
    return {
        "orders": ORDERS,
        "problems": problems,
        "random": figures(everything),
        **{name: figures(samples) for name, samples in ours.items()},
    }


def table(findings: Findings) -> Table:
    heads = ("order", "accuracy", "TPF", "faster than of random orders")
    problems = findings["problems"]
    count = len(problems)
    best = sum(p["random_tpf"][-1] for p in problems) / count
    worst = sum(p["random_tpf"][0] for p in problems) / count
    random = findings["random"]
    rows = [
        ("worst random of each problem", "", f"{worst:.2f}", ""),
        ("random", f"{random['accuracy']:.0%}", f"{random['tpf']:.2f}", ""),
        ("best random of each problem", "", f"{best:.2f}", ""),
    ]
    for name in ("D2F", "LoPA"):
        share = sum(p[name]["faster_than"] for p in problems) / count
        figure = findings[name]
        rows.append((name, f"{figure['accuracy']:.0%}", f"{figure['tpf']:.2f}", f"{share:.0%}"))
    return heads, rows


def draw(findings: Findings) -> Any:
    figure, part = plots.require_plots().subplots(figsize=(7, 4.2))
    problems = findings["problems"]
    places = list(range(1, len(problems) + 1))
    part.boxplot([p["random_tpf"] for p in problems], positions=places, whis=(0, 100))
    for name, mark in (("D2F", "v"), ("LoPA", "^")):
        part.plot(places, [p[name]["tpf"] for p in problems], mark, label=name)
    part.set_xlabel(f"problem (boxes: {findings['orders']} random orders each, to the extremes)")
    part.set_ylabel("tokens per forward")
    part.legend()
    part.grid(alpha=0.3)
    return figure
