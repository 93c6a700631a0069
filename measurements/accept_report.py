"""Tables of the ways to accept a branch: the studies `accept` and `exact`, temperature, trials."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markdown_sections import accuracy, command, machine, read_lines, table, widest

HERE = Path(__file__).parent
FOLDER = HERE.parent / "docs" / "studies"
TASKS = ("words", "functions")
D2F = "D2F"
SETS = ("accept", "accept-held-out", "accept-block")  # folders, behind the task
FRONT = {
    "D2F": "D2F (no lookahead)",
    "published, k = 7": "LoPA as published, k = 7",
    "agreed, k = 7": "LoPA by default, k = 7",
    "agreed, k = 15": "LoPA by default, k = 15",
}

Run = dict[str, Any]  # a file that `lopa study` wrote


def sections() -> dict[str, str]:
    return {
        "results": _front(),
        "accept": _accept(),
        "exact": _exact(),
        "temperature": _temperature(),
        "trials": _trials(),
    }


def _run(task: str, name: str, study: str) -> Run:
    path = FOLDER / f"{task}-{name}" / f"{study}.json"
    run: Run = json.loads(path.read_text(encoding="utf-8"))
    return run


def _points(found: Mapping[str, Any]) -> str:
    low, high = found["difference_interval"]
    return f"{100 * found['difference']:+.1f} ({100 * low:+.1f} … {100 * high:+.1f})"


def _front() -> str:
    """For the front page: eval problems, and exact of its own problems."""
    runs = {task: _run(task, "accept", "accept") for task in TASKS}
    exact = {task: _run(task, "exact", "exact") for task in TASKS}
    heads = ("decoding", *(f"{t}: {w}" for t in TASKS for w in ("accuracy", "TPF", "× D2F")))
    rows = []
    for name, shown in FRONT.items():
        rows.append([shown, *_cells(runs, name)])
    rows.append(["LoPA `exact`, k = 15", *_cells(exact, "exact, k = 15")])
    first, other = runs[TASKS[0]], exact[TASKS[0]]
    said = (
        f"{first['problems']} problems per task, seed {first['seed']} ({other['problems']}, seed "
        f"{other['seed']}, for `exact`: the same tokens as D2F); {machine(first['host'])}."
    )
    return "\n\n".join([command(*_commands("accept", "exact")), table(heads, rows), said])


def _cells(runs: Mapping[str, Run], name: str) -> list[str]:
    cells = []
    for run in runs.values():
        found, plain = run["findings"]["arms"][name], run["findings"]["arms"][D2F]
        cells += [accuracy(found), f"{found['tpf']:.2f}", f"{found['tpf'] / plain['tpf']:.2f}"]
    return cells


def _accept() -> str:
    heads = [
        "problems, attention",
        "decoding",
        *(f"{t}: {w}" for t in TASKS for w in ("accuracy − D2F, points", "TPF", "× D2F")),
    ]
    rows = []
    for name in SETS:
        runs = {task: _run(task, name, "accept") for task in TASKS}
        first = runs[TASKS[0]]
        label = f"{first['split']}, {first['settings']['attention']}"
        for arm in first["findings"]["arms"]:
            cells = []
            for run in runs.values():
                found, plain = run["findings"]["arms"][arm], run["findings"]["arms"][D2F]
                right = accuracy(found) if arm == D2F else _points(found)
                times = f"{found['tpf'] / plain['tpf']:.2f}"
                cells += [right, f"{found['tpf']:.2f}", times]
            rows.append([label, arm, *cells])
    said = (
        f"{first['problems']} problems per line, seed {first['seed']}; {machine(first['host'])}. "
        "Differences are paired with D2F on the same problems, with 95 % intervals; of D2F the "
        "accuracy itself."
    )
    return "\n\n".join([command(*_commands(*SETS)), table(heads, rows), said])


def _exact() -> str:
    runs = {task: _run(task, "exact", "exact") for task in TASKS}
    heads = ["decoding", *(f"{t}: {w}" for t in TASKS for w in ("same answers", "TPF", "× D2F"))]
    rows = []
    for arm in runs[TASKS[0]]["findings"]["arms"]:
        cells = []
        for run in runs.values():
            found, plain = run["findings"]["arms"][arm], run["findings"]["arms"][D2F]
            times = f"{found['tpf'] / plain['tpf']:.2f}"
            cells += [f"{found['same_answers']:.1%}", f"{found['tpf']:.2f}", times]
        rows.append([arm, *cells])
    first = runs[TASKS[0]]
    said = f"{first['problems']} problems per task, seed {first['seed']}; {machine(first['host'])}."
    return "\n\n".join([command(*_commands("exact")), table(heads, rows), said])


def _commands(*names: str) -> list[str]:
    """One loop over the tasks for each set of problems."""
    lines = []
    for name in names:
        text = _run(TASKS[0], name, name.partition("-")[0])["command"]
        general = text.replace(TASKS[0], "$task")
        lines.append(f"for task in {' '.join(TASKS)}; do {general}; done")
    return lines


def _temperature() -> str:
    runs = [
        json.loads((HERE / "h200" / f"temperature_{task}.json").read_text(encoding="utf-8"))
        for task in TASKS
    ]
    heads = ["temperature", *(f"{t}: {w}" for t in TASKS for w in ("accuracy", "TPF"))]
    rows = []
    for points in zip(*(run["points"] for run in runs), strict=True):
        cells = [f"{points[0]['options']['temperature']:g}"]
        for point in points:
            cells += [accuracy(point), f"{point['tpf']:.2f}"]
        rows.append(cells)
    first = runs[0]
    values = ",".join(f"{t:g}" for t in first["axes"]["temperature"])
    text = (
        f"lopa eval TASK --sweep temperature={values} --limit {first['problems']} "
        f"--seed {first['seed']} --batch-size {first['batch_size']}"
    )
    every = [point for run in runs for point in run["points"]]
    said = f"{first['problems']} problems; {machine(first['host'])}. {widest(every)}."
    return "\n\n".join([command(text), table(heads, rows), said])


def _trials() -> str:
    heads = ["", "what", "k", "problems"]
    heads += [f"{t}: {w}" for t in TASKS for w in ("accuracy − D2F, points", "× D2F's TPF")]
    rows: list[Sequence[str]] = []
    group = ""
    for trial in read_lines(HERE / "lookahead_trials.jsonl"):
        cells = []
        for task in TASKS:
            found = trial[task] | {"difference_interval": trial[task]["interval"]}
            cells += [_points(found), f"{found['times']:.2f}"]
        shown = "" if trial["group"] == group else trial["group"]
        group = trial["group"]
        counts = str(trial["branches"]), f"{trial['problems']}, seed {trial['seed']}"
        rows.append([shown, trial["what"], *counts, *cells])
    return table(heads, rows)
