"""Tables of round times and throughput on a GPU, from what `measurements/gpu.sh` wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from markdown_sections import table

FOLDER = Path(__file__).parent / "h200"
KINDS = ("bf16", "fp8", "int8")
ROW_TOKENS = {
    "64": "64 (two blocks)",
    "32": "32 (`--append-at 1`)",
    "16": "16 (`--append-at 1 --block-size 16`)",
}


def sections() -> dict[str, str]:
    runs = {kind: json.loads((FOLDER / f"rounds_{kind}.json").read_text()) for kind in KINDS}
    return {
        "rounds-short": _short(runs),
        "rounds": _rounds(runs),
        "rounds-detail": _detail(runs),
        "throughput": _throughput(),
    }


def _shape(one: dict[str, Any]) -> str:
    return f"{one['branches'] + 1} × {one['window']}"


def _short(runs: dict[str, Any]) -> str:
    heads = ("rows × tokens", "bf16, ms per round", "fp8, ms per round")
    pairs = zip(runs["bf16"]["rounds"], runs["fp8"]["rounds"], strict=True)
    return table(
        heads,
        [
            (_shape(a), f"{a['round_ms']:.1f}", f"{b['round_ms']:.1f}")
            for a, b in pairs
            if a["window"] == 64 and a["branches"] in (0, 3, 7)
        ],
    )


def _rounds(runs: dict[str, Any]) -> str:
    heads = ("rows × tokens", *(f"{kind} ms" for kind in KINDS))
    same = zip(*(runs[kind]["rounds"] for kind in KINDS), strict=True)
    rows = [(_shape(ones[0]), *(f"{one['round_ms']:.2f}" for one in ones)) for ones in same]
    return "\n".join([table(heads, rows), "", f"{_machine(runs)}."])


def _detail(runs: dict[str, Any]) -> str:
    heads = ("layers", "rows × tokens", "masks", "round ms", "forward ms", "host ms", "floor ms",
             "round / floor", "GB/s", "TFLOP/s")  # fmt: skip
    rows = [
        (
            kind,
            _shape(one),
            f"{one['masks']:.0f}",
            f"{one['round_ms']:.2f}",
            f"{one['forward_ms']:.2f}",
            f"{one['host_ms']:.2f}",
            f"{one['floor_ms']:.2f}",
            f"{one['ratio']:.2f}",
            f"{one['gigabytes_per_second']:.0f}",
            f"{one['teraflops']:.0f}",
        )
        for kind, run in runs.items()
        for one in run["rounds"]
    ]
    ceilings = "; ".join(
        f"{kind} {run['bytes_per_second'] / 1e12:.2f} TB/s and "
        f"{(run['quantised_flops_per_second'] or run['flops_per_second']) / 1e12:.0f} TFLOP/s"
        for kind, run in runs.items()
    )
    counts = sorted({one["rounds"] for run in runs.values() for one in run["rounds"]})
    said = f"{counts[0]} to {counts[-1]} rounds per line. Ceilings measured in the same runs: "
    return "\n".join([table(heads, rows), "", f"{_machine(runs)}; {said}{ceilings}."])


def _throughput() -> str:
    heads = ("layers", "tokens per row", "1 request, tokens/s", "32 requests, tokens/s", "ratio",
             "first round ms")  # fmt: skip
    rows = []
    for kind in ("bf16", "fp8"):
        for size, said in ROW_TOKENS.items():
            run = json.loads((FOLDER / f"throughput_{kind}_{size}.json").read_text())
            rows.append(
                (
                    kind,
                    said,
                    f"{run['tokens_per_second']:.0f}",
                    f"{run['together']['tokens_per_second']:.0f}",
                    f"{run['together']['times_one']:.1f}",
                    f"{run['first_round_ms']:.1f}",
                )
            )
    return table(heads, rows)


def _machine(runs: dict[str, Any]) -> str:
    host = runs["bf16"]["host"]
    return f"{host['model']}, {host['device']}, torch {host['torch']}"
