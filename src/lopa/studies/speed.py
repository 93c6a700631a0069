"""Measured speed of `auto` against every fixed number of branches, one prompt at a time.

Each problem is decoded under all settings in turn, and every problem begins with another setting,
so that whatever slows the machine down affects all of them alike. A number that is far from the
fastest after some problems is timed no further. Ratios are of tokens over seconds, over all
problems that both have; their interval is a bootstrap over the problems.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lopa.config import AUTO_BRANCHES, DecodeConfig
from lopa.evaluation import plots
from lopa.evaluation.scoring import score
from lopa.studies.study import Findings, Study, Table
from lopa.tasks.problem import Problem

RESAMPLES = 2000
TRIAL = 24  # problems before any number is dropped
FAR = 0.8  # one below this share of the fastest is, by the median of the problems


_Counts = tuple[float, float, int, int]  # tokens, seconds, rounds, branches of one decode


def run(study: Study) -> Findings:
    cost = study.model.round_cost  # measured before anything is timed
    configs = {str(k): study.config(branches=k) for k in (*AUTO_BRANCHES, "auto")}
    found: dict[str, list[_Counts]] = {name: [] for name in configs}
    texts: dict[str, list[str]] = {name: [] for name in configs}
    study.model.generate(study.problems[0].prompt, configs["auto"])  # so that all is loaded
    for number, problem in enumerate(study.problems):
        names = _near(found) if number >= TRIAL else list(configs)
        for place in range(len(names)):
            name = names[(number + place) % len(names)]
            counts, text = _decode(study, problem, configs[name])
            found[name].append(counts)
            texts[name].append(text)
        study.progress(number + 1, len(study.problems))
    auto = np.array(found["auto"]).T
    settings = {}
    for name, lines in found.items():
        both = np.stack([np.array(lines).T, auto[:, : len(lines)]])  # [this and auto, what, n]
        tokens, seconds, rounds, tried = both[0]
        speeds = both[:, 0].sum(axis=1) / both[:, 1].sum(axis=1)
        right = map(score, study.problems, texts[name])
        settings[name] = {
            "problems": len(lines),
            "tokens_per_second": speeds[0],
            "tpf": tokens.sum() / rounds.sum(),
            "round_ms": 1e3 * seconds.sum() / rounds.sum(),
            "answer_seconds": seconds.mean(),
            "branches": tried.sum() / rounds.sum(),
            "accuracy": sum(right) / len(lines),
            "auto": speeds[1] / speeds[0],
            "interval": interval(both[:, 0], both[:, 1], study.seed),
        }
    return {"round_cost": cost.settings(), "settings": settings}


def _near(found: dict[str, list[_Counts]]) -> list[str]:
    """Auto and the fixed numbers that may still be the best."""
    first = {name: np.array(lines[:TRIAL]) for name, lines in found.items()}
    speeds = {name: np.median(lines[:, 0] / lines[:, 1]) for name, lines in first.items()}
    best = max(speed for name, speed in speeds.items() if name != "auto")
    return [name for name, speed in speeds.items() if name == "auto" or speed >= FAR * best]


def _decode(study: Study, problem: Problem, config: DecodeConfig) -> tuple[_Counts, str]:
    if study.model.device.type != "cpu":  # once before, so that its kernels and graphs are made
        study.model.generate(problem.prompt, config)
    output = study.model.generate(problem.prompt, config)
    tried = sum(len(r.branches) - 1 for r in output.trace.rounds)
    return (output.tokens, output.seconds, output.rounds, tried), output.text


def interval(tokens: Any, seconds: Any, seed: int) -> list[float]:
    """95 % of auto's speed over another's, over resampled problems; rows: other, auto."""
    count = tokens.shape[1]
    resampled = np.random.default_rng(seed).integers(count, size=(RESAMPLES, count))
    speeds = tokens[:, resampled].sum(axis=2) / seconds[:, resampled].sum(axis=2)
    low, high = np.quantile(speeds[1] / speeds[0], (0.025, 0.975)).tolist()
    return [low, high]


def best_fixed(findings: Findings) -> str:
    """Of those that were timed to the end."""
    settings = findings["settings"]
    speeds: dict[str, float] = {
        name: found["tokens_per_second"]
        for name, found in settings.items()
        if name != "auto" and found["problems"] == settings["auto"]["problems"]
    }
    return max(speeds, key=speeds.__getitem__)


def table(findings: Findings) -> Table:
    heads = ("branches", "problems", "branches per round", "accuracy", "TPF", "ms per round",
             "ms per answer", "tokens/s", "auto / this")  # fmt: skip
    return heads, [
        (
            name,
            str(f["problems"]),
            f"{f['branches']:.1f}",
            f"{f['accuracy']:.0%}",
            f"{f['tpf']:.2f}",
            f"{f['round_ms']:.2f}",
            f"{1e3 * f['answer_seconds']:.1f}",
            f"{f['tokens_per_second']:.1f}",
            f"{f['auto']:.3f} ({f['interval'][0]:.3f} … {f['interval'][1]:.3f})"
            if name != "auto"
            else "",
        )
        for name, f in findings["settings"].items()
    ]


def reading(findings: Findings) -> str:
    best = best_fixed(findings)
    ratio = findings["settings"][best]["auto"]
    return (
        f"The fastest fixed number of branches is {best}. `auto` makes {ratio:.3f} times its "
        "tokens per second."
    )


def plot(findings: Findings) -> Any:
    figure, part = plots.require_plots().subplots(figsize=(6.5, 4))
    names = list(findings["settings"])
    speeds = [f["tokens_per_second"] for f in findings["settings"].values()]
    part.bar(names, speeds, color=["C1" if name == "auto" else "C0" for name in names])
    part.set_xlabel("branches")
    part.set_ylabel("tokens per second, one prompt at a time")
    part.grid(axis="y", alpha=0.3)
    return figure
