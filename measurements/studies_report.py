"""Tables of the studies, from what `lopa study` wrote to docs/studies.

A study's own table is of one task. Here both tasks stand side by side, in a short form; the long
form, with every column, command and picture, is for docs/studies/README.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from lopa.studies import load, speed
from markdown_sections import command, machine, table, widest

FOLDER = Path(__file__).parent.parent / "docs" / "studies"
TASKS = ("words", "functions")
# Study → columns that name a line, and columns that are shown of each task.
COLUMNS: dict[str, tuple[Sequence[str], Sequence[str]]] = {
    "branches": (("lookahead", "branches"), ("accuracy", "TPF")),
    "auto": (("decoding",), ("AUP",)),
    "ablation": (("variant",), ("accuracy", "TPF")),
}
READ = ("calibration", "order", "overhead", "sync")  # in words alone

Run = dict[str, Any]  # a file that `lopa study` wrote


def sections() -> dict[str, str]:
    runs: dict[str, list[tuple[Path, Run]]] = {}
    for path in sorted(FOLDER.glob("*/*.json"), key=_order):
        run = json.loads(path.read_text(encoding="utf-8"))
        runs.setdefault(run["study"], []).append((path, run))
    by_task = {study: {run["task"]: run for _, run in found} for study, found in runs.items()}
    timed = [run for _, run in runs["load"] if "costs" not in run]
    return {
        "auto-speed": _auto_speed(runs),
        "load": _load([run for _, run in runs["load"] if "costs" in run]),
        "load-h200": _load([run for run in timed if "H200" in run["host"]["device"]]),
        "load-cpu": _load([run for run in timed if "H200" not in run["host"]["device"]]),
        "readings": "\n".join(_readings(name, runs[name]) for name in READ),
        "studies": "\n\n".join(_study(name, found) for name, found in sorted(runs.items())),
        **{name: _short(by_task[name]) for name in COLUMNS},
    }


def plot() -> None:
    """The picture of every study, beside its figures."""
    from lopa.evaluation.plots import save

    for path in FOLDER.glob("*/*.json"):
        run = json.loads(path.read_text(encoding="utf-8"))
        save(_module(run).plot(run["findings"]), path.with_suffix(""))


def _short(runs: dict[str, Run]) -> str:
    """Both tasks side by side, accuracies without their intervals, and how it was measured."""
    keys, values = COLUMNS[next(iter(runs.values()))["study"]]
    heads, lines = list(keys), dict[tuple[str, ...], list[str]]()
    for task, run in runs.items():
        heads += [f"{task}: {value}" if len(runs) > 1 else value for value in values]
        names, rows = _module(run).table(run["findings"])
        for row in rows:
            cells = dict(zip(names, row, strict=True))
            line = lines.setdefault(tuple(cells[key] for key in keys), [])
            line += [re.sub(r" \(.*?\)", "", cells[value]) for value in values]
    body = table(heads, [(*name, *cells) for name, cells in lines.items()])
    return "\n\n".join([command(*_commands(runs)), body, _measured(runs, "accuracy" in values)])


def _auto_speed(runs: dict[str, list[tuple[Path, Run]]]) -> str:
    """`auto` against the best fixed number."""
    heads = ("accept", "task", "round cost of", "best fixed k", "its tokens/s", "auto's",
             "auto / best", "accuracy, best → auto")  # fmt: skip
    rows = []
    for _, run in runs[speed.__name__.rpartition(".")[2]]:
        settings = run["findings"]["settings"]
        best = speed.best_fixed(run["findings"])
        ratio = _ratio(settings[best]["auto"], settings[best]["interval"])
        host = f"{run['host']['model']}, {_device(run['host']['device'])}"
        both = settings[best], settings["auto"]
        rows.append(_line(run, host, best, both, ratio))
    return table(heads, rows)


def _line(run: Run, cost: str, best: str, both: tuple[Run, Run], ratio: str) -> tuple[str, ...]:
    speeds = [f"{one['tokens_per_second']:.0f}" for one in both]
    right = " → ".join(f"{one['accuracy']:.0%}" for one in both)
    accept = run["settings"].get("accept", "score")
    return accept, run["task"], cost, best, *speeds, ratio, right


def _load(runs: Sequence[Run]) -> str:
    """By task and requests at once: the fixed numbers and auto, all simulated or all timed."""
    heads: Sequence[str] = ()
    lines = []
    for run in runs:
        heads, rows = load.table(run["findings"])
        lines += [(run["task"], *row) for row in rows]
    alike: dict[str, dict[str, Run]] = {}  # by what they have in common, by task
    for run in runs:
        alike.setdefault(run["command"].replace(run["task"], "$task"), {})[run["task"]] = run
    commands = [line for by_task in alike.values() for line in _commands(by_task)]
    counts = " and ".join(map(str, sorted({run["problems"] for run in runs})))
    measured = f"{counts} problems; {machine(runs[0]['host'])}."
    return "\n\n".join([command("\n".join(commands)), table(("task", *heads), lines), measured])


def _device(name: str) -> str:
    return name.removeprefix("NVIDIA ") if "NVIDIA" in name else "CPU"


def _ratio(value: float, interval: Sequence[float]) -> str:
    return f"{value:.3f} ({interval[0]:.3f} … {interval[1]:.3f})"


def _readings(name: str, runs: Sequence[tuple[Path, Run]]) -> str:
    """A line of a list: what the study found."""
    module = import_module(f"lopa.studies.{name}")
    found = {run["task"]: module.reading(run["findings"]) for _, run in runs}
    said = " ".join(f"`{task}`: {text}" if len(found) > 1 else text for task, text in found.items())
    return f"- [{name}](studies/README.md#{name}): {said}"


def _study(name: str, runs: Sequence[tuple[Path, Run]]) -> str:
    """Everything of one study, for those who look into it."""
    parts = [f"## {name}", str(import_module(f"lopa.studies.{name}").__doc__).strip()]
    for path, run in runs:
        found = run["findings"]
        picture = path.with_suffix(".png").relative_to(FOLDER).as_posix()
        parts += [
            f"### {name}: {path.parent.name}",
            command(run["command"]),
            table(*_module(run).table(found)),
            f"{run['problems']} problems of `{run['task']}`, seed {run['seed']}; "
            f"{machine(run['host'])}.",
            _module(run).reading(found),
            f"![{name}, {path.parent.name}]({picture})",
        ]
    return "\n\n".join(parts)


def _module(run: Run) -> Any:
    return import_module(f"lopa.studies.{run['study']}")


def _commands(runs: dict[str, Run]) -> list[str]:
    """What makes the figures: one loop where the tasks differ by their name alone."""
    given = {task: run["command"] for task, run in runs.items()}
    general = {text.replace(task, "$task") for task, text in given.items()}
    if len(given) > 1 and len(general) == 1:
        return [f"for task in {' '.join(given)}; do {general.pop()}; done"]
    return list(given.values())


def _measured(runs: dict[str, Run], interval: bool) -> str:
    counted = [figures for run in runs.values() for figures in _figures(run["findings"])]
    return f"{_problems(runs)}." + (f" {widest(counted)}." if interval else "")


def _problems(runs: dict[str, Run]) -> str:
    run = next(iter(runs.values()))
    problems = f"{run['problems']} problems"
    if len({one["problems"] for one in runs.values()}) > 1:
        problems = " and ".join(f"{one['problems']} problems of `{t}`" for t, one in runs.items())
    return f"{problems}, seed {run['seed']}; {machine(run['host'])}"


def _figures(found: Any) -> list[dict[str, Any]]:
    """Everything in some findings that has an accuracy and its interval."""
    if isinstance(found, list):
        return [figures for part in found for figures in _figures(part)]
    if not isinstance(found, dict):
        return []
    if "accuracy" in found and "correct" in found:
        return [found]
    return [figures for part in found.values() for figures in _figures(part)]


def _order(path: Path) -> tuple[bool, str]:
    return "words" not in path.parent.name, path.parent.name
