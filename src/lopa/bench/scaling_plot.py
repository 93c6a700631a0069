"""The picture of the scaling model, next to the paper's points. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lopa.bench.scaling import PAPER, PAPER_TPF, Point
from lopa.errors import LopaError


def plot(points: Sequence[Point], title: str, tpf: float, path: Path, paper: bool) -> None:
    """paper: with its points, which are of a 7B model on H200s."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        raise LopaError("pictures need matplotlib: pip install 'lopa[plots]'") from None
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), constrained_layout=True)
    for tensors in sorted({p.tensor_parallel for p in points}):
        line = [p for p in points if p.tensor_parallel == tensors]
        _line(left, [(p.branch_parallel, p.round_ms, p.measured) for p in line], f"TP {tensors}")
        _line(right, [(p.devices, p.tokens_per_second, p.measured) for p in line], f"TP {tensors}")
    if paper:
        branches, speed, _ = PAPER[-1]
        left.plot([branches], [1e3 * PAPER_TPF / speed], "k*", markersize=11, label="paper, BP8")
    for branches, low, high in PAPER if paper else ():
        label = f"paper, BP{branches}, MBPP" + (", its own TPF" if branches != 8 else "")
        right.errorbar(
            [branches],
            [(low + high) / 2],
            yerr=[[(high - low) / 2]] * 2,
            fmt="k*" if branches == 8 else "ks",
            capsize=4,
            label=label,
        )
    left.set(xlabel="branch-parallel degree", ylabel="round, ms", ylim=(0, None))
    right.set(xlabel="devices", ylabel=f"tokens/s at {tpf:g} tokens per round", ylim=(0, None))
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.suptitle(f"{title}\nfilled: measured on one device; lines and open points: modelled")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _line(axes: Any, found: Sequence[tuple[float, float, bool]], label: str) -> None:
    (line,) = axes.plot(*zip(*[(x, y) for x, y, _ in found], strict=True), "--", label=label)
    for x, y, measured in found:
        face = line.get_color() if measured else "white"
        axes.plot([x], [y], "o", color=line.get_color(), markerfacecolor=face)
