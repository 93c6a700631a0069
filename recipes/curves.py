"""The curves of a run: metrics.jsonl to a PNG. Needs matplotlib, which training does not.

python3 recipes/curves.py runs/tiny/metrics.jsonl curves.png
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any


def read(path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The lines of training and those of evaluation."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
    train = [line for line in lines if line["kind"] == "train"]
    return train, [line for line in lines if line["kind"] == "eval"]


def plot(metrics: Path, picture: Path) -> None:
    """Loss, exact answers and tokens per forward over the minutes of the run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    train, evaluation = read(metrics)
    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(13, 4), layout="constrained")
    left.plot([t["seconds"] / 60 for t in train], [t["loss"] for t in train], label="training")
    left.set(title="loss of masked tokens", yscale="log")
    panels = {"loss_": left, "accuracy_": middle, "tpf_": right}
    names = sorted({name for line in evaluation for name in line})
    for name in names:
        for prefix, axes in panels.items():
            if name.startswith(prefix):
                points = [(e["seconds"] / 60, e[name]) for e in evaluation if name in e]
                label = name.removeprefix(prefix).replace("_", " ", 1)
                axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=label)
    middle.set(title="exact answers (evaluation split)", ylim=(0, 1))
    right.set(title="tokens per forward")
    for axes in (left, middle, right):
        axes.set_xlabel("minutes")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(picture, dpi=120)
    pyplot.close(figure)


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("metrics", type=Path)
    parser.add_argument("picture", type=Path)
    options = parser.parse_args(given)
    try:
        plot(options.metrics, options.picture)
    except ImportError:
        print("error: curves need matplotlib: pip install matplotlib", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
