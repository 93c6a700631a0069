"""Tables of docs/checkpoints.md: what a checkpoint needs, what speed to expect, what is known."""

from __future__ import annotations

import json
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from lopa.cli.main import main as lopa
from lopa.cli.terminal import bytes_text, count_text
from lopa.models.families import FAMILIES
from markdown_sections import table

ROUNDS = Path(__file__).parent / "h200" / "rounds_bf16.json"
ANSWER = 256  # tokens
GPUS = (1, 2, 4, 8)
# Checkpoint and its adapter, benchmark, branches, and the TPF published for them (arXiv 2512.16229,
# tables 1 and 2).
PUBLISHED = (
    ("Dream-7B, D2F adapter", "GSM8K", 0, 3.1),
    ("Dream-7B, D2F adapter", "GSM8K", 14, 10.1),
    ("Dream-7B, D2F adapter", "MATH", 0, 2.6),
    ("Dream-7B, D2F adapter", "MATH", 7, 8.0),
    ("Dream-7B, D2F adapter", "HumanEval", 0, 2.5),
    ("Dream-7B, D2F adapter", "HumanEval", 7, 6.3),
    ("DiffuCoder-7B, D2F adapter", "HumanEval+", 0, 2.2),
    ("DiffuCoder-7B, D2F adapter", "HumanEval+", 6, 8.3),
)
SHAPES = ("dream-7b", "llada-8b", "sdar-8b", "llada2-mini", "sdar-30b-a3b", "llada2-flash")


def sections() -> dict[str, str]:
    return {"expected": _expected(), "memory": _memory(), "hub-ids": _hub_ids()}


def _said(*arguments: str) -> Any:
    said = StringIO()
    with redirect_stdout(said):
        assert lopa([*arguments, "--json"]) == 0
    return json.loads(said.getvalue())


def _expected() -> str:
    heads = ("checkpoint", "benchmark", "branches", "TPF", f"rounds for {ANSWER} tokens",
             *(f"{count} H200{'s' if count > 1 else ''}, tokens/s" for count in GPUS))  # fmt: skip
    rows = []
    for name, benchmark, branches, tpf in PUBLISHED:
        asked = ("--branches", str(branches), "--tpf", str(tpf))
        points = _said("bench", "scaling", str(ROUNDS), *asked)["points"]
        speeds = {
            p["branch_parallel"]: f"{p['tokens_per_second']:.0f}"
            for p in points
            if p["tensor_parallel"] == 1
        }
        shown = [speeds[count] if branches or count == 1 else "" for count in GPUS]
        rows.append((name, benchmark, str(branches), f"{tpf}", f"{ANSWER / tpf:.0f}", *shown))
    return table(heads, rows)


def _memory() -> str:
    heads = ("shape", "parameters", "weights in bf16", "KV cache, 1,024 tokens")
    rows, devices = [], {}
    for shape in SHAPES:
        found = _said("models", "check", f"dummy:{shape}")
        devices = {fit["device"]: fit["tensor_parallel"] for fit in found["fits"]}
        rows.append(
            (
                f"`{shape}`",
                count_text(found["parameters"]),
                bytes_text(found["weight_bytes"]),
                bytes_text(found["kv_bytes_per_1k"]),
                *(str(count or "–") for count in devices.values()),
            )
        )
    return table((*heads, *devices), rows)


def _hub_ids() -> str:
    rows = []
    for family in FAMILIES:
        adapters = {base: adapter for adapter, base in family.adapters.items()}
        for name in family.hub_ids:
            adapter = f"`{adapters[name]}`" if name in adapters else ""
            rows.append((f"`{name}`", family.name, adapter))
    return table(("hub id", "family", "adapter for `d2f` and `lopa`"), rows)
