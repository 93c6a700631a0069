"""The table and the picture of docs/results.md, from the lines of measurements/tradeoff.py.

    python measurements/tradeoff_report.py measurements/tradeoff.jsonl docs

Writes docs/tradeoff.png (needs matplotlib) and puts the table between its marks in results.md.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from marks import put_in

TASKS = ("words", "functions")


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def kind(options: dict[str, Any]) -> str:
    if options["decoder"] == "d2f":
        return "one token a round"
    if options["decoder"] != "lopa":
        return str(options["decoder"])
    if options["branches"] == 0:
        return "D2F"
    floor = options.get("lookahead_floor")
    return f"LoPA k={options['branches']}" + (f", floor {floor}" if floor else "")


def order(row: dict[str, Any]) -> tuple[Any, ...]:
    options = row["options"]
    return (
        row["split"] != "eval",
        options.get("attention", "full") != "full",
        options["decoder"] != "d2f",
        options.get("threshold", 0),
        options.get("branches", -1),
        options.get("lookahead_floor", 0),
    )


def table(rows: list[dict[str, Any]]) -> str:
    """One line a setting, the tasks side by side: accuracy with its 95 % interval, and TPF."""
    settings: dict[str, dict[str, dict[str, Any]]] = {}
    for row in sorted(rows, key=order):
        options = row["options"]
        threshold = options.get("threshold", 1.0)
        name = (
            f"| {row['split']} | {options.get('attention', 'full')} | {kind(options)} | "
            f"{'' if threshold == 1.0 else threshold} |"
        )
        settings.setdefault(name, {})[row["task"]] = row["report"]
    lines = [
        "| problems | attention | decoder | τ | words | TPF | functions | TPF |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, found in settings.items():
        cells = []
        for task in TASKS:
            report = found.get(task)
            if report is None:
                cells += ["not measured", ""]
                continue
            low, high = report["interval"]
            accuracy = f"{report['accuracy']:.1%} ({low:.1%} … {high:.1%})"
            cells += [accuracy, f"{report['tpf']:.2f}"]
        lines.append(f"{name} {' | '.join(cells)} |")
    return "\n".join(lines)


def picture(rows: list[dict[str, Any]], path: Path) -> None:
    """Accuracy against TPF: a curve over k for each attention, with and without a floor."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(TASKS), figsize=(11, 4.4), sharey=True)
    curves: dict[tuple[Any, ...], list[tuple[float, float, float, float, int]]] = {}
    for row in rows:
        options, report = row["options"], row["report"]
        if row["split"] != "eval" or options["decoder"] != "lopa":
            continue
        low, high = report["interval"]
        point = (report["tpf"], report["accuracy"], low, high, options["branches"])
        floors = [0.0, 0.3] if options["branches"] == 0 else [options.get("lookahead_floor", 0.0)]
        for floor in floors:
            key = (row["task"], options["threshold"], options["attention"], floor)
            curves.setdefault(key, []).append(point)
    # Blue and orange for the attentions, darker with the threshold; dashed with a floor.
    shades = {"full": plt.get_cmap("Blues"), "block": plt.get_cmap("Oranges")}
    thresholds = sorted({key[1] for key in curves})
    depth = {t: 0.4 + 0.5 * (i + 1) / len(thresholds) for i, t in enumerate(thresholds)}
    for (task, threshold, attention, floor), points in sorted(curves.items()):
        points.sort()
        axis = axes[TASKS.index(task)]
        x, y = [p[0] for p in points], [100 * p[1] for p in points]
        error = [[100 * (p[1] - p[2]) for p in points], [100 * (p[3] - p[1]) for p in points]]
        axis.errorbar(
            x,
            y,
            error,
            color=shades[attention](depth[threshold]),
            linestyle="--" if floor else "-",
            marker="s" if floor else "o",
            markersize=4,
            linewidth=1.2,
            elinewidth=0.6,
            capsize=2,
            label=f"{attention}, τ = {threshold}" + (f", floor {floor}" if floor else ""),
        )
        if not floor:
            for p in points:
                place = (p[0], 100 * p[1])
                axis.annotate(f"{p[4]}", place, (3, 4), textcoords="offset points", fontsize=7)
    for axis, task in zip(axes, TASKS, strict=True):
        axis.set_title(task)
        axis.set_xlabel("tokens per forward (to the end of text, first round included)")
        axis.grid(alpha=0.3)
        axis.set_xlim(left=0)
    axes[0].set_ylabel("accuracy, % (numbers: branches k)")
    axes[0].legend(loc="lower left", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    rows, docs = read(Path(sys.argv[1])), Path(sys.argv[2])
    put_in(docs / "results.md", "tradeoff", table(rows))
    picture(rows, docs / "tradeoff.png")


if __name__ == "__main__":
    main()
