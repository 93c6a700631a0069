"""Where does the time of a round go, by the number of branches?

The forward includes what the host does to launch it and to read its statistics.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any

from lopa.evaluation import plots
from lopa.studies.study import Findings, Study, Table

BRANCHES = (0, 1, 3, 7, 15)
PARTS = ("prepare", "forward", "select", "commit")


def run(study: Study) -> Findings:
    found = {}
    for done, k in enumerate(BRANCHES):
        if study.model.device.type != "cpu":
            _time(study, k)  # kernels are compiled
        found[str(k)] = _time(study, k)
        study.progress(done + 1, len(BRANCHES))
    return {"branches": found}


def _time(study: Study, branches: int) -> Findings:
    """Median milliseconds of each part, over all rounds but the first of each answer."""
    config = study.config(branches=branches)
    runner = study.model.runner
    times: dict[str, list[float]] = {part: [] for part in PARTS}
    for problem in study.problems:
        session = study.model.session(problem.prompt, config)
        slot = runner.open(config, session.capacity)
        assert slot is not None
        try:
            while True:
                marks = [time.perf_counter()]
                plan = session.plan()
                marks.append(time.perf_counter())
                if plan is None:
                    break
                stats = None
                while stats is None:
                    (stats,) = runner.forward([(slot, plan)])
                marks.append(time.perf_counter())
                winner = session.choose(stats)
                marks.append(time.perf_counter())
                runner.commit([(slot, winner)])
                marks.append(time.perf_counter())
                if session.record(marks[-1] - marks[0]).round.index > 1:
                    for part, began, ended in zip(PARTS, marks, marks[1:], strict=False):
                        times[part].append(ended - began)
        finally:
            runner.close(slot)
    found = {part: 1e3 * median(values) for part, values in times.items()}
    whole = sum(found.values())
    return {
        "rounds": len(times["forward"]),
        "milliseconds": found,
        "shares": {part: value / whole for part, value in found.items()},
    }


def table(findings: Findings) -> Table:
    heads = ("branches", "rounds", *(f"{part} ms" for part in PARTS), "forward / round")
    return heads, [
        (
            k,
            str(f["rounds"]),
            *(f"{f['milliseconds'][part]:.2f}" for part in PARTS),
            f"{f['shares']['forward']:.1%}",
        )
        for k, f in findings["branches"].items()
    ]


def reading(findings: Findings) -> str:
    host = {
        k: sum(f["milliseconds"].values()) - f["milliseconds"]["forward"]
        for k, f in findings["branches"].items()
    }
    most = list(host)[-1]
    return (
        f"Outside the forward a round takes {next(iter(host.values())):.2f} ms without branches "
        f"and {host[most]:.2f} ms with {most}."
    )


def plot(findings: Findings) -> Any:
    figure, part = plots.require_plots().subplots(figsize=(6.5, 4))
    names = list(findings["branches"])
    below = [0.0] * len(names)
    for piece in PARTS:
        values = [100 * f["shares"][piece] for f in findings["branches"].values()]
        part.bar(names, values, bottom=below, label=piece)
        below = [b + v for b, v in zip(below, values, strict=True)]
    part.set_xlabel("branches")
    part.set_ylabel("share of a round, %")
    part.legend(**plots.LEGEND)
    return figure
