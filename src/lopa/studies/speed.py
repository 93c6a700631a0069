"""Tokens a second of `auto` against every fixed number of branches, one prompt at a time.

Each problem is decoded under all settings in turn, and the turn begins elsewhere with every
problem, so that whatever slows the machine down meets all of them alike. Ratios are of tokens over
seconds, all problems together; their interval is from drawing the problems again.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lopa.config import AUTO_BRANCHES
from lopa.evaluation import plots, tasks
from lopa.studies.study import Findings, Study, Table

DRAWS = 2000
PASSES = 3  # over the problems on an accelerator, after one that compiles kernels
MARGIN = 0.03  # by which auto may miss the best fixed number


def run(study: Study) -> Findings:
    cost = study.model.round_cost  # measured before anything is timed
    configs = {str(k): study.config(branches=k) for k in (*AUTO_BRANCHES, "auto")}
    fast = study.model.device.type != "cpu"
    warm = study.problems if fast else study.problems[:1]
    _time(study, configs, warm, 0, 1, {})
    passes = PASSES if fast else 1
    times = np.zeros((4, len(configs), len(study.problems)))  # tokens, seconds, rounds, branches
    texts: dict[tuple[str, int], str] = {}  # by setting and problem; every pass makes the same
    for turn in range(passes):
        times += _time(study, configs, study.problems, turn, passes, texts)
    right = {key: tasks.score(study.problems[key[1]], text) for key, text in texts.items()}
    tokens, seconds, rounds, tried = times
    speed = tokens.sum(axis=1) / seconds.sum(axis=1)
    return {
        "round_cost": cost.points,
        "passes": passes,
        "settings": {
            name: {
                "tokens_per_second": speed[row],
                "tpf": tokens[row].sum() / rounds[row].sum(),
                "round_ms": 1e3 * seconds[row].sum() / rounds[row].sum(),
                "answer_seconds": seconds[row].sum() / (passes * len(study.problems)),
                "branches": tried[row].sum() / rounds[row].sum(),
                "accuracy": sum(ok for (of, _), ok in right.items() if of == name)
                / len(study.problems),
                "auto": speed[-1] / speed[row],
                "interval": interval(tokens[[row, -1]], seconds[[row, -1]], study.seed),
            }
            for row, name in enumerate(configs)
        },
    }


def _time(
    study: Study,
    configs: Any,
    problems: Any,
    turn: int,
    passes: int,
    texts: dict[tuple[str, int], str],
) -> Any:
    """One pass: [what is counted, settings, problems]. Nothing is scored in between."""
    found = np.zeros((4, len(configs), len(problems)))
    names = list(configs)
    for number, problem in enumerate(problems):
        for place in range(len(names)):
            row = (number + turn + place) % len(names)
            output = study.model.generate(problem.prompt, configs[names[row]])
            tried = sum(len(r.branches) - 1 for r in output.trace.rounds)
            found[:, row, number] = output.tokens, output.seconds, output.rounds, tried
            texts[names[row], number] = output.text
        study.progress(turn * len(problems) + number + 1, passes * len(problems))
    return found


def interval(tokens: Any, seconds: Any, seed: int) -> list[float]:
    """95 % of auto's speed over another's, over draws of as many problems; rows: other, auto."""
    count = tokens.shape[1]
    draws = np.random.default_rng(seed).integers(count, size=(DRAWS, count))
    speeds = tokens[:, draws].sum(axis=2) / seconds[:, draws].sum(axis=2)  # [2, draws]
    low, high = np.quantile(speeds[1] / speeds[0], (0.025, 0.975)).tolist()
    return [low, high]


def best_fixed(findings: Findings) -> str:
    speeds: dict[str, float] = {
        name: found["tokens_per_second"]
        for name, found in findings["settings"].items()
        if name != "auto"
    }
    return max(speeds, key=speeds.__getitem__)


def table(findings: Findings) -> Table:
    heads = ("branches", "tried a round", "accuracy", "TPF", "ms a round", "ms an answer",
             "tokens/s", "auto / this")  # fmt: skip
    return heads, [
        (
            name,
            f"{f['branches']:.1f}",
            f"{f['accuracy']:.0%}",
            f"{f['tpf']:.2f}",
            f"{f['round_ms']:.2f}",
            f"{1e3 * f['answer_seconds']:.1f}" if "answer_seconds" in f else "",
            f"{f['tokens_per_second']:.1f}",
            f"{f['auto']:.3f} ({f['interval'][0]:.3f} … {f['interval'][1]:.3f})"
            if name != "auto"
            else "",
        )
        for name, f in findings["settings"].items()
    ]


def reading(findings: Findings) -> str:
    best = best_fixed(findings)
    found, auto = findings["settings"][best], findings["settings"]["auto"]
    low, high = found["interval"]
    least = 1 - MARGIN
    kept = "within" if low >= least else "not within" if high < least else "perhaps within"
    points = ", ".join(f"{tokens} tokens {1e3 * s:.2f} ms" for tokens, s in findings["round_cost"])
    return (
        f"The fastest fixed number here is {best}. `auto` makes {found['auto']:.3f} times its "
        "tokens a "
        f"second ({low:.3f} … {high:.3f}), with {auto['branches']:.1f} branches a round: {kept} "
        f"{MARGIN:.0%} of the best. It went by the cost that it measured first: {points}."
    )


def draw(findings: Findings) -> Any:
    figure, part = plots.require_plots().subplots(figsize=(6.5, 4))
    names = list(findings["settings"])
    speeds = [f["tokens_per_second"] for f in findings["settings"].values()]
    part.bar(names, speeds, color=["C1" if name == "auto" else "C0" for name in names])
    part.set_xlabel("branches")
    part.set_ylabel("tokens a second, one prompt at a time")
    part.grid(axis="y", alpha=0.3)
    return figure
