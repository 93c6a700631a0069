"""Tables of what more devices would give, as `lopa bench scaling` models it."""

from __future__ import annotations

import json
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from lopa.cli.main import main as lopa
from markdown_sections import table

FOLDER = Path(__file__).parent
GPU = FOLDER / "h200" / "rounds_bf16.json"
CPU = FOLDER / "rounds_cpu.json"
CPU_OPTIONS = "--window 64 --bandwidth 1 --latency 500 --host-ms 0.5 --tpf 5.3"
TWO_RANKS = FOLDER / "rounds_cpu_two_ranks.json"
SHOWN = ((1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (4, 2))  # BP × TP


def sections() -> dict[str, str]:
    (two,) = json.loads(TWO_RANKS.read_text(encoding="utf-8"))["rounds"]
    return {
        "scaling": _table(_model(GPU), {}),
        "scaling-cpu": _table(_model(CPU, CPU_OPTIONS), {2: two["round_ms"]}),
    }


def plot(picture: Path) -> None:
    _model(GPU, f"--picture {picture}")


def _model(measured: Path, options: str = "") -> list[dict[str, Any]]:
    said = StringIO()
    with redirect_stdout(said):
        assert lopa(["bench", "scaling", str(measured), *options.split(), "--json"]) == 0
    points: list[dict[str, Any]] = json.loads(said.getvalue())["points"]
    return points


def _table(points: list[dict[str, Any]], measured: dict[int, float]) -> str:
    """measured: milliseconds of a round by BP, beside what is modelled."""
    heads = ("BP × TP", "round ms", "tokens/s", "", *(("measured ms",) if measured else ()))
    rows = []
    for point in points:
        bp, tp = point["branch_parallel"], point["tensor_parallel"]
        if (bp, tp) in SHOWN:
            there = measured.get(bp) if tp == 1 else None
            speed = point["tokens_per_second"]
            rows.append(
                (
                    f"{bp} × {tp}",
                    f"{point['round_ms']:.1f}",
                    f"{speed:.{0 if speed > 99 else 1}f}",
                    "measured" if point["measured"] else "modelled",
                    *((f"{there:.1f}" if there else "",) if measured else ()),
                )
            )
    return table(heads, rows)
