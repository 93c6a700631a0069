"""Pages whose tables are written by a command: each stands between its mark and the next end."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

END = "<!-- end -->"


def put(text: str, name: str, what: str) -> str:
    """The text with `what` between <!-- name --> and its end; as it is where there is no mark."""
    begin = f"<!-- {name} -->"
    head, mark, rest = text.partition(begin)
    _, end, tail = rest.partition(END)
    return f"{head}{begin}\n{what}\n{end}{tail}" if mark and end else text


def put_in(page: Path, name: str, what: str) -> None:
    """The same in a page, which must have the mark."""
    text = page.read_text(encoding="utf-8")
    if END not in text.partition(f"<!-- {name} -->")[2]:
        sys.exit(f"{page} has no <!-- {name} --> … {END}")
    page.write_text(put(text, name, what), encoding="utf-8")


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a table in Markdown."""
    rule = "|" + "---|" * len(heads)
    return [f"| {' | '.join(heads)} |", rule, *(f"| {' | '.join(row)} |" for row in rows)]
