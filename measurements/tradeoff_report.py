"""Tables and picture of accuracy against tokens per forward, from `measurements/tradeoff.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from markdown_sections import accuracy, read_lines, table, widest

RECORD = Path(__file__).with_name("tradeoff.jsonl")
TASKS = ("words", "functions")
ONE = "one token per round"
# Of every attention and split, what the short table has: decoder and threshold.
SHOWN = {
    ("eval", "full"): {
        (ONE, ""), ("vanilla", ""), ("fast-dllm", "0.9"), ("D2F", "0.8"), ("D2F", "0.9"),
        ("D2F", "0.95"), ("LoPA k=7", "0.8"), ("LoPA k=7", "0.9"), ("LoPA k=7", "0.95"),
    },
    ("eval", "block"): {("D2F", "0.9"), ("LoPA k=7", "0.9")},
    ("held-out", "full"): {("D2F", "0.9"), ("LoPA k=7", "0.9")},
}  # fmt: skip
MODEL_CARD = {
    ("eval", "full"): {(ONE, ""), ("D2F", "0.9"), ("LoPA k=7", "0.9")},
    ("held-out", "full"): {(ONE, "")},
}
Settings = dict[tuple[str, ...], dict[str, dict[str, Any]]]  # → task → report


def sections() -> dict[str, str]:
    lines = read_lines(RECORD)
    settings: Settings = {}
    for line in sorted(lines, key=_order):
        settings.setdefault(_name(line), {})[line["task"]] = line["report"]
    said = f"{lines[0]['report']['problems']} problems per line."
    interval = widest(line["report"] for line in lines)
    return {
        "decoders": "\n".join([_table(_chosen(settings, SHOWN)), "", f"{said} {interval}."]),
        "tradeoff-detail": "\n".join([_table(settings, interval=True), "", said]),
        "model-card": _table(_chosen(settings, MODEL_CARD), interval=True),
    }


def _chosen(settings: Settings, shown: dict[tuple[str, str], set[tuple[str, str]]]) -> Settings:
    return {
        (split, attention, decoder, threshold): found
        for (split, attention, decoder, threshold), found in settings.items()
        if (decoder, threshold) in shown.get((split, attention), ())
    }


def _table(settings: Settings, interval: bool = False) -> str:
    heads = ("problems, attention", "decoder", "τ", "words: accuracy", "TPF",
             "functions: accuracy", "TPF")  # fmt: skip
    rows = []
    for (split, attention, decoder, threshold), found in settings.items():
        cells = [f"{split}, {attention}", decoder, threshold]
        for task in TASKS:
            report = found.get(task)
            cells += [accuracy(report, interval), f"{report['tpf']:.2f}"] if report else ["", ""]
        rows.append(cells)
    return table(heads, rows)


def _name(line: dict[str, Any]) -> tuple[str, ...]:
    options = line["options"]
    threshold = options.get("threshold", 1.0)
    shown = "" if threshold == 1.0 else f"{threshold:g}"
    return line["split"], options.get("attention", "full"), _decoder(options), shown


def _decoder(options: dict[str, Any]) -> str:
    if options["decoder"] == "d2f":
        return ONE
    if options["decoder"] != "lopa":
        return str(options["decoder"])
    if options["branches"] == 0:
        return "D2F"
    floor = options.get("lookahead_floor")
    return f"LoPA k={options['branches']}" + (f", floor {floor}" if floor else "")


def _order(line: dict[str, Any]) -> tuple[Any, ...]:
    options = line["options"]
    return (
        line["split"] != "eval",
        options.get("attention", "full") != "full",
        options["decoder"] != "d2f",
        options.get("threshold", 0),
        options.get("branches", -1),
        options.get("lookahead_floor", 0),
    )


def plot(picture: Path) -> None:
    """Accuracy against TPF: a curve over k for each attention, with and without a floor."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = read_lines(RECORD)
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
        axis.set_xlabel("tokens per forward (up to EOS, first round included)")
        axis.grid(alpha=0.3)
        axis.set_xlim(left=0)
    axes[0].set_ylabel("accuracy, % (numbers: branches k)")
    axes[0].legend(loc="lower left", fontsize=8)
    figure.tight_layout()
    figure.savefig(picture, dpi=110)
    plt.close(figure)
