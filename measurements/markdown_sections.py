"""Sections of Markdown pages that a command writes, each between its marker and an end marker."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

END = "<!-- end -->"
_MARKER = re.compile(r"<!-- ([\w-]+) -->")


def markers(text: str) -> list[str]:
    """The names of a page's sections."""
    return [name for name in _MARKER.findall(text) if name != "end"]


def fill(text: str, sections: Mapping[str, str]) -> str:
    """The page with its sections filled; a KeyError names a marker that no section belongs to."""
    for name in markers(text):
        begin = f"<!-- {name} -->"
        head, _, rest = text.partition(begin)
        _, end, tail = rest.partition(END)
        if not end or begin in tail:
            raise ValueError(f"{begin} needs one {END}")
        text = f"{head}{begin}\n{sections[name]}\n{END}{tail}"
    return text


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    rule = "|" + "---|" * len(heads)
    return "\n".join([_row(heads), rule, *map(_row, rows)])


def _row(cells: Sequence[str]) -> str:
    return "|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|"


def command(*lines: str) -> str:
    """A block of code."""
    return "\n".join(["```", *lines, "```"])


def read_lines(path: Path) -> list[dict[str, Any]]:
    """A file of JSON Lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def accuracy(figures: Mapping[str, Any], interval: bool = False) -> str:
    low, high = figures["interval"]
    return f"{figures['accuracy']:.1%}" + (f" ({low:.1%} … {high:.1%})" if interval else "")


def widest(all_figures: Iterable[Mapping[str, Any]]) -> str:
    """The widest of some 95 % intervals, in points."""
    bounds = [(f["accuracy"], f["interval"]) for f in all_figures]
    reach = max(max(value - low, high - value) for value, (low, high) in bounds)
    return f"95 % intervals: at most ±{100 * reach:.1f} points"


def machine(host: Mapping[str, Any]) -> str:
    """What a figure was measured on."""
    kind = host["quantize"] or host["dtype"]
    parts = [host["model"], kind, host["device"], f"torch {host['torch']}"]
    return ", ".join([*parts, *(f"{host[n]} products" for n in ("products",) if n in host)])
