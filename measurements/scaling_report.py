"""What `lopa bench scaling` models, in the docs.

    lopa bench scaling measurements/h200/rounds_bf16.json --json |
        python measurements/scaling_report.py scaling docs/results.md
    lopa bench scaling measurements/rounds_cpu.json … --json |
        python measurements/scaling_report.py scaling-cpu docs/results.md \\
            2=measurements/rounds_cpu_two_ranks.json

The table goes between the mark of that name and its end. N=FILE: what `lopa bench round
--branch-parallel N` measured, beside what is modelled.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from marks import put_in, table

SHOWN = ((1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (4, 2))  # BP × TP


def lines(points: list[dict[str, Any]], measured: dict[int, float]) -> list[str]:
    """measured: milliseconds of a round by BP."""
    heads = ("BP × TP", "round ms", "tokens/s", "", *(("measured there, ms",) if measured else ()))
    rows = []
    for point in points:
        replicas, parts = point["branch_parallel"], point["tensor_parallel"]
        if (replicas, parts) in SHOWN:
            there = measured.get(replicas) if parts == 1 else None
            rows.append(
                (
                    f"{replicas} × {parts}",
                    f"{point['round_ms']:.1f}",
                    f"{point['tokens_per_second']:.{0 if point['tokens_per_second'] > 99 else 1}f}",
                    "measured" if point["measured"] else "modelled",
                    *((f"{there:.1f}" if there else "",) if measured else ()),
                )
            )
    return table(heads, rows)


def main() -> None:
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    mark, page, *files = sys.argv[1:]
    measured = {}
    for given in files:
        ranks, _, file = given.partition("=")
        (found,) = json.loads(Path(file).read_text(encoding="utf-8"))["rounds"]
        measured[int(ranks)] = found["round_ms"]
    put_in(Path(page), mark, "\n".join(lines(json.load(sys.stdin)["points"], measured)))


if __name__ == "__main__":
    main()
