"""A report as one HTML file that needs nothing else: a table, and the pictures inside it."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem;
  color: #1d1d1f; background: #fff }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .25rem .7rem; text-align: right; border-bottom: 1px solid #ddd }
th:first-child, td:first-child { text-align: left }
svg { max-width: 100%; height: auto; margin: 1rem 0 } code { background: #f4f4f5 }
"""

HEADS = ("setting", "n", "accuracy (95 % interval)", "TPF", "TPF (paper)", "tokens/s")


def rows(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The table of a sweep, in words."""
    from lopa.evaluation.sweep import setting_name

    return [
        (
            setting_name(p["options"]),
            str(p["problems"]),
            f"{p['accuracy']:.1%} ({p['interval'][0]:.1%} … {p['interval'][1]:.1%})",
            f"{p['tpf']:.2f}",
            f"{p['tpf_paper']:.2f}",
            f"{p['tokens_per_second']:.1f}",
        )
        for p in report["points"]
    ]


def make_page(
    title: str,
    notes: Sequence[str],
    heads: Sequence[str],
    table: Sequence[Sequence[str]],
    pictures: Sequence[Path],
) -> str:
    """pictures: SVG files, which go into the page."""
    head = "".join(f"<th>{html.escape(h)}</th>" for h in heads)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>\n"
        for row in table
    )
    figures = "\n".join(_inline(path) for path in pictures)
    said = "".join(f"<p>{html.escape(note)}</p>\n" for note in notes)
    return (
        f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style>\n"
        f"<h1>{html.escape(title)}</h1>\n{said}"
        f"<table>\n<tr>{head}</tr>\n{body}</table>\n{figures}\n</html>"
    )


def _inline(path: Path) -> str:
    """The figure without its XML head, its ids made unique: several share the page."""
    text = path.read_text(encoding="utf-8")
    text = text[text.index("<svg") :]
    for mark in ('id="', 'href="#', "url(#"):
        text = text.replace(mark, f"{mark}{path.stem}-")
    return text.rstrip()
