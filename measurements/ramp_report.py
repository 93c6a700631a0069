"""Tables of a server from idle to overload and back: on a GPU, and by what rounds cost there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lopa.bench.serve_load import LatencyRatio
from markdown_sections import table

FOLDER = Path(__file__).parent
TASKS = ("words", "functions")


def sections() -> dict[str, str]:
    """Of files that `lopa bench serve --ramp --branches --json` wrote, and simulated_ramp.py."""
    files = {"ramp": "h200/ramp", "simulated-ramp": "simulated_ramp"}
    return {name: tables(FOLDER / path) for name, path in files.items()}


def tables(path: Path) -> str:
    """path: of the files, without the task."""
    files = [path.with_name(f"{path.name}_{task}.json") for task in TASKS]
    return "\n\n".join(ramp(json.loads(file.read_text(encoding="utf-8"))) for file in files)


def ramp(run: dict[str, Any]) -> str:
    """By rate, in the order of the run: median latencies, auto's over the best, its branches."""
    loads: dict[str, list[dict[str, Any]]] = {}
    for load in run["loads"]:
        loads.setdefault(load["asked"], []).append(load)
    auto = loads["auto"]
    found = run["auto_over_envelope"]
    ratios = ["–" if ratio is None else str(LatencyRatio(**ratio)) for ratio in found]
    heads = (f"{run['task']}: requests a second", *(f"{load['offered']:.3g}" for load in auto))
    rows = [("requests", *(str(load["requests"]) for load in auto))]
    for name, each in loads.items():
        medians = (1000 * load["latency"]["p50"] for load in each)
        rows.append((f"median ms, {name}", *(f"{median:.1f}" for median in medians)))
    rows += [
        ("auto / best, by request", *ratios),
        ("branches of auto", *(f"{load['branches']:.1f}" for load in auto)),
    ]
    return table(heads, rows)
