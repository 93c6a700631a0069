"""What `lopa bench round` and `lopa bench decode --together` found on a GPU, in the docs.

    python measurements/rounds_report.py measurements/h200 docs/results.md

The folder is one that `measurements/gpu.sh FOLDER rounds together` has written. Tables go between
the marks <!-- rounds --> and <!-- together --> and their ends.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from marks import put_in, table

KINDS = ("bf16", "fp8", "int8")
GOALS = {  # milliseconds of a whole round, by precision, branches and window
    ("bf16", 0, 64): 4.3,
    ("bf16", 3, 64): 6.4,
    ("bf16", 7, 64): 12.0,
    ("fp8", 7, 64): 8.0,
}
ROWS = {
    "64": "64 tokens (two blocks)",
    "32": "32 tokens (`--append-at 1`)",
    "16": "16 tokens (`--append-at 1 --block-size 16`)",
}


def rounds(folder: Path) -> str:
    found = {kind: json.loads((folder / f"rounds_{kind}.json").read_text()) for kind in KINDS}
    heads = ("layers", "rows × tokens", "masks", "round ms", "goal", "forward ms", "host ms",
             "floor ms", "round / floor", "GB/s", "TFLOP/s")  # fmt: skip
    lines = []
    for kind, run in found.items():
        for one in run["rounds"]:
            goal = GOALS.get((kind, one["branches"], one["window"]))
            lines.append(
                (
                    kind,
                    f"{one['branches'] + 1} × {one['window']}",
                    f"{one['masks']:.0f}" if "masks" in one else "",
                    f"{one['round_ms']:.2f}",
                    f"{goal:.1f}" if goal else "",
                    f"{one['forward_ms']:.2f}",
                    f"{one['host_ms']:.2f}",
                    f"{one['floor_ms']:.2f}",
                    f"{one['ratio']:.2f}",
                    f"{one['gigabytes_per_second']:.0f}",
                    f"{one['teraflops']:.0f}",
                )
            )
    ceilings = "; ".join(
        f"with {kind} {run['bytes_per_second'] / 1e12:.2f} TB/s and "
        f"{(run['quantised_flops_per_second'] or run['flops_per_second']) / 1e12:.0f} TFLOP/s"
        for kind, run in found.items()
    )
    counts = sorted({one["rounds"] for run in found.values() for one in run["rounds"]})
    of = f"{_host(found['bf16'])}; {counts[0]} to {counts[-1]} rounds a line."
    said = f"{of} Ceilings measured in the same runs: {ceilings}."
    return "\n".join([*table(heads, lines), "", said])


def together(folder: Path) -> str:
    heads = ("layers", "a row", "one: tokens/s", "32 at once: tokens/s", "times", "first token ms")
    lines, host = [], ""
    for kind in ("bf16", "fp8"):
        for size, said in ROWS.items():
            path = folder / f"together_{kind}_{size}.json"
            if not path.exists():
                continue
            run = json.loads(path.read_text())
            many = run["together"]
            host = _host(run)
            lines.append(
                (
                    kind,
                    said,
                    f"{run['tokens_per_second']:.0f}",
                    f"{many['tokens_per_second']:.0f}",
                    f"{many['times_one']:.1f}",
                    f"{run['first_round_ms']:.1f}",
                )
            )
    return "\n".join([*table(heads, lines), "", f"{host}."])


def _host(run: dict[str, Any]) -> str:
    host = run["host"]
    return f"{host['model']}, {host['device']}, torch {host['torch']}, lopa {host['lopa']}"


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    folder, page = map(Path, sys.argv[1:])
    put_in(page, "rounds", rounds(folder))
    put_in(page, "together", together(folder))


if __name__ == "__main__":
    main()
