"""Tables of what lower precision does to answers, from the lines of `measurements/precision.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from markdown_sections import accuracy, read_lines, table, widest

RECORD = Path(__file__).with_name("precision.jsonl")
TASKS = ("words", "functions")


def sections() -> dict[str, str]:
    lines = read_lines(RECORD)
    return {"precision": _both_tasks(lines), "precision-detail": _detail(lines)}


def _both_tasks(lines: list[dict[str, Any]]) -> str:
    heads = ["branches", "precision"]
    for task in TASKS:
        heads += [f"{task}: accuracy", "TPF", "identical"]
    by = {(x["branches"], x["precision"], x["task"]): x for x in lines}
    rows = []
    for branches, precision in sorted({(b, p) for b, p, _ in by}, key=_order(lines)):
        cells = [str(branches), precision]
        for task in TASKS:
            x = by[branches, precision, task]
            cells += [accuracy(x), f"{x['tpf']:.2f}", f"{x['identical']:.0%}"]
        rows.append(cells)
    return "\n".join([table(heads, rows), "", _said(lines)])


def _order(lines: list[dict[str, Any]]) -> Any:
    kinds = list(dict.fromkeys(x["precision"] for x in lines))
    return lambda key: (key[0], kinds.index(key[1]))


def _detail(lines: list[dict[str, Any]]) -> str:
    heads = ("task", "branches", "precision", "accuracy", "TPF", "identical", "same until")
    rows = [
        (
            x["task"],
            str(x["branches"]),
            x["precision"],
            accuracy(x, interval=True),
            f"{x['tpf']:.2f}",
            f"{x['identical']:.1%}",
            f"{x['same_until']:.1%}",
        )
        for x in sorted(lines, key=lambda x: (x["task"] != "words", x["branches"]))
    ]
    return "\n".join([table(heads, rows), "", _said(lines)])


def _said(lines: list[dict[str, Any]]) -> str:
    first = lines[0]
    host = f"{first['device']}, torch {first['torch']}"
    return f"{first['problems']} problems per line; {host}. {widest(lines)}."
