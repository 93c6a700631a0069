"""Where does the time of a round go, by the number of branches?"""

from __future__ import annotations

import time
from statistics import median
from typing import Any

from lopa.evaluation import plots
from lopa.studies.study import Findings, Study, Table

BRANCHES = (0, 1, 3, 7)
PARTS = ("prepare", "forward", "select", "commit")


def answers(study: Study) -> int:
    return len(BRANCHES) * len(study.problems)


def run(study: Study) -> Findings:
    return {"branches": {str(k): _time(study, k) for k in BRANCHES}}


def _time(study: Study, branches: int) -> Findings:
    """Median milliseconds of each part, over all rounds but the first of each answer."""
    config = study.config(branches=branches)
    runner = study.llm.runner
    times: dict[str, list[float]] = {part: [] for part in PARTS}
    for problem in study.problems:
        session = study.llm.session(problem.prompt, config)
        try:
            session.open()
            while True:
                marks = [time.perf_counter()]
                plan = session.decoder.plan()
                marks.append(time.perf_counter())
                if plan is None:
                    break
                stats = None
                while stats is None:
                    (stats,) = runner.forward([(session.slot, plan)])
                marks.append(time.perf_counter())
                record = session.decoder.advance(stats)
                marks.append(time.perf_counter())
                runner.commit([(session.slot, record.winner)])
                marks.append(time.perf_counter())
                if record.index > 1:
                    for part, began, ended in zip(PARTS, marks, marks[1:], strict=False):
                        times[part].append(ended - began)
        finally:
            session.close()
        study.tick()
    found = {part: 1e3 * median(values) for part, values in times.items()}
    whole = sum(found.values())
    return {
        "rounds": len(times["forward"]),
        "milliseconds": found,
        "shares": {part: value / whole for part, value in found.items()},
    }


def table(findings: Findings) -> Table:
    heads = ("branches", "rounds", *(f"{part} ms" for part in PARTS), "forward's share")
    return heads, [
        (
            k,
            str(f["rounds"]),
            *(f"{f['milliseconds'][part]:.2f}" for part in PARTS),
            f"{f['shares']['forward']:.1%}",
        )
        for k, f in findings["branches"].items()
    ]


def draw(findings: Findings) -> Any:
    figure, part = plots.require_plots().subplots(figsize=(6.5, 4))
    names = list(findings["branches"])
    below = [0.0] * len(names)
    for piece in PARTS:
        values = [100 * f["shares"][piece] for f in findings["branches"].values()]
        part.bar(names, values, bottom=below, label=piece)
        below = [b + v for b, v in zip(below, values, strict=True)]
    part.set_xlabel("branches")
    part.set_ylabel("share of a round, %")
    part.legend(fontsize=8)
    return figure
