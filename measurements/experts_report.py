"""Tables of experts and of long prompts on a GPU, from what `measurements/gpu.sh` wrote."""

from __future__ import annotations

import json
from typing import Any

from markdown_sections import table
from rounds_report import FOLDER

NAMES = {"dummy:llada2-mini": "LLaDA2.0-mini", "dummy:llada2-flash": "LLaDA2.0-flash"}
# Tokens per forward that the paper reports of D2F-Dream, without lookahead and with it
PAPER_TPF = (3, 10)


def sections() -> dict[str, str]:
    rounds = [
        line
        for part in ("rounds", "flash")
        for line in _lines(f"experts_{part}.jsonl")
        if line["what"].startswith("round of ")
    ]
    return {
        "experts": _rounds(rounds),
        "experts-ratio": _eight_over_one(rounds),
        "long-context": _long_context(),
    }


def _lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (FOLDER / name).read_text().splitlines()]


def _name(line: dict[str, Any]) -> str:
    return NAMES[line["what"].removeprefix("round of ")]


def _rounds(rounds: list[dict[str, Any]]) -> str:
    heads = ("model", "weights", "rows × tokens", "rows differ in", "experts touched", "GB",
             "forward ms", "floor ms", "forward / floor")  # fmt: skip
    return table(
        heads,
        [
            (
                _name(one),
                one["kind"],
                f"{one['rows']} × {one['window']}",
                "" if one["rows"] == 1 else "one token" if one["alike"] else "all tokens",
                f"{one['touched']:.0f} of 256",
                f"{one['gigabytes']:.1f}",
                f"{one['forward_ms']:.2f}",
                f"{one['floor_ms']:.2f}",
                f"{one['ratio']:.2f}",
            )
            for one in rounds
        ],
    )


def _eight_over_one(rounds: list[dict[str, Any]]) -> str:
    """Rows that differ in one token, as branches do."""
    found = []
    for one in rounds:
        if one["rows"] > 1:
            continue
        same = one["what"], one["kind"], one["window"]
        for other in rounds:
            if other["alike"] and (other["what"], other["kind"], other["window"]) == same:
                times = one["forward_ms"], other["forward_ms"]
                found.append((_name(one), one["kind"], one["window"], *times))
    for kind in ("bf16", "fp8"):
        dense = json.loads((FOLDER / f"rounds_{kind}.json").read_text())["rounds"]
        times = [r["forward_ms"] for r in dense if r["window"] == 64 and r["branches"] in (0, 7)]
        found.append(("Dream-7B (dense)", kind, 64, *times))
    heads = ("model", "weights", "tokens of a row", "one row, ms", "eight rows, ms", "eight / one",
             f"projected tokens/s: one row at {PAPER_TPF[0]} a forward",
             f"eight rows at {PAPER_TPF[1]}")  # fmt: skip
    rows = []
    for name, kind, window, first, eight in found:
        rates = (1e3 * tpf / ms for tpf, ms in zip(PAPER_TPF, (first, eight), strict=True))
        times = (f"{first:.2f}", f"{eight:.2f}", f"{eight / first:.2f}")
        rows.append((name, kind, str(window), *times, *(f"{rate:,.0f}" for rate in rates)))
    return table(heads, rows)


def _long_context() -> str:
    rows = []
    for line in (FOLDER / "prefill_7b.txt").read_text().splitlines():
        tokens, ms, _, rate, _ = line.split()
        rows.append((f"prefill of {int(tokens):,} tokens", ms, "", f"{rate} TFLOP/s"))
    for one in json.loads((FOLDER / "rounds_32k.json").read_text())["rounds"]:
        shape = f"{one['branches'] + 1} × {one['window']} behind {one['prefix']:,} tokens"
        times = f"{one['forward_ms']:.1f}", f"{one['floor_ms']:.1f}"
        rows.append((f"round of {shape}", *times, f"{one['ratio']:.2f} × the floor"))
    return table(("Dream-7B's shape, bf16", "ms", "floor ms", ""), rows)
