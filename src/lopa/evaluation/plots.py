"""Pictures of a sweep, as PNG for pages and SVG for the report. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lopa.errors import ConfigError
from lopa.evaluation.sweep import of_curve, setting_name

Report = Mapping[str, Any]

# A place of its own: finding the best one takes long enough on a busy machine to be warned about.
LEGEND: dict[str, Any] = {"fontsize": 8, "loc": "lower right"}
MOST_INSIDE = 5  # curves whose legend fits inside the axes


def require_plots() -> Any:
    """matplotlib.pyplot, without a display; found missing before a long run, not after it."""
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("pictures need matplotlib: pip install 'lopa[plots]'") from None
    matplotlib.use("Agg")
    # The same figures give the same file: no dates, no random names.
    matplotlib.rcParams["svg.hashsalt"] = "lopa"
    import matplotlib.pyplot as plt

    return plt


def save(figure: Any, path: Path) -> list[Path]:
    """Both formats; `path` has no ending."""
    figure.tight_layout()
    found = [path.with_suffix(".png"), path.with_suffix(".svg")]
    figure.savefig(found[0], dpi=110)
    figure.savefig(found[1], metadata={"Date": None})
    require_plots().close(figure)
    return found


def plot_sweep(report: Report, folder: Path) -> list[Path]:
    """Every picture of a sweep; returns the files."""
    kinds: dict[str, Callable[[Report], Any]] = {
        "axis": by_axis,
        "tradeoff": tradeoff,
        "rounds": by_round,
    }
    return [path for name, plot in kinds.items() for path in save(plot(report), folder / name)]


def by_axis(report: Report) -> Any:
    """Tokens per forward and score against the first axis."""
    figure, (left, right) = require_plots().subplots(1, 2, figsize=(10, 4))
    axis = next(iter(report["axes"]))
    for curve in report["curves"]:
        points = of_curve(report, curve)
        x = [str(p["options"][axis]) for p in points]
        label = setting_name(curve["shared"]) or report["task"]
        left.plot(x, [p["tpf"] for p in points], "o-", label=label)
        right.errorbar(x, *accuracies(points), fmt="o-", capsize=3, label=label)
    left.set_ylabel("tokens per forward")
    right.set_ylabel("accuracy, %")
    for part in (left, right):
        part.set_xlabel(axis)
        part.grid(alpha=0.3)
        part.legend(**LEGEND)
    left.set_ylim(bottom=0)
    return figure


def tradeoff(report: Report) -> Any:
    """Accuracy against tokens per forward."""
    figure, part = require_plots().subplots(figsize=(6.5, 4.4))
    axis = next(iter(report["axes"]))
    for curve in report["curves"]:
        points = sorted(of_curve(report, curve), key=lambda p: p["tpf"])
        x = [p["tpf"] for p in points]
        label = f"{setting_name(curve['shared'])} AUP {curve['aup']:.0f}".strip()
        part.errorbar(x, *accuracies(points), fmt="o-", capsize=3, label=label)
        for p in points:
            place = (p["tpf"], 100 * p["accuracy"])
            name = str(p["options"][axis])
            part.annotate(name, place, (4, 4), textcoords="offset points", fontsize=8)
    part.set_xlabel("tokens per forward (up to EOS, first round included)")
    part.set_ylabel(f"accuracy, % (numbers: {axis})")
    part.set_xlim(left=0)
    part.grid(alpha=0.3)
    if len(report["curves"]) > MOST_INSIDE:
        figure.set_figwidth(9.5)
        part.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))
    else:
        part.legend(**LEGEND)
    return figure


def by_round(report: Report) -> Any:
    """Tokens per round over the course of decoding."""
    figure, part = require_plots().subplots(figsize=(6.5, 4.4))
    for point in report["points"]:
        values = point["by_round"]
        part.plot(range(1, len(values) + 1), values, ".-", label=setting_name(point["options"]))
    part.set_xlabel("round")
    part.set_ylabel("tokens filled (mean over the answers that had the round)")
    part.set_ylim(bottom=0)
    part.grid(alpha=0.3)
    part.legend(**LEGEND)
    return figure


def accuracies(points: list[dict[str, Any]]) -> tuple[list[float], list[list[float]]]:
    """Accuracies in percent, and how far their intervals reach below and above."""
    values = [100 * p["accuracy"] for p in points]
    below = [100 * (p["accuracy"] - p["interval"][0]) for p in points]
    above = [100 * (p["interval"][1] - p["accuracy"]) for p in points]
    return values, [[max(0.0, b) for b in below], [max(0.0, a) for a in above]]
