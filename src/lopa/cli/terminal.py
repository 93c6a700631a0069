"""Writing to a terminal: untrusted text, notes on standard error, tables."""

from __future__ import annotations

import os
import sys
import unicodedata
from collections.abc import Iterable
from typing import TYPE_CHECKING

from lopa.distributed.launch import is_main_rank

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from lopa.config import DecodeConfig
    from lopa.engine.output import Output

# Invisible, but part of how words (Persian) and emoji are written.
_JOINERS = "\u200c\u200d"
_FILE_WIDTH = 160  # columns of a table in a file or pipe


def visible(text: str, newline: str = "\n") -> str:
    """`text` with control and invisible characters replaced by visible ones. Tabs stay.

    Escape sequences cannot move the cursor, and marks that reorder text cannot mislead.
    """
    return "".join(_visible(char, newline) for char in text)


def _visible(char: str, newline: str) -> str:
    code = ord(char)
    if char == "\n":
        return newline
    if char == "\t" or char in _JOINERS:
        return char
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "␡"
    if unicodedata.category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp"):
        return f"\\u{code:04x}"
    return char


def one_line(text: str) -> str:
    return visible(" ".join(text.split()))


def safe_for(stream_is_terminal: bool, text: str) -> str:
    """Text for standard output: made visible on a terminal, unchanged in a file or pipe."""
    return visible(text) if stream_is_terminal else text


def stderr_console() -> Console:
    """A console on standard error, where everything but the output goes."""
    from rich.console import Console

    silent = None if is_main_rank() else open(os.devnull, "w")  # noqa: SIM115 (for the whole run)
    return Console(stderr=True, file=silent, highlight=False, markup=False)


def print_note(message: str) -> None:
    if is_main_rank():
        print(message, file=sys.stderr)


def label(config: DecodeConfig) -> str:
    """The decoder, and how many branches it has."""
    if config.decoder != "lopa":
        return config.decoder
    return "lopa auto" if config.branches == "auto" else f"lopa k={config.branches}"


def statistics(output: Output, cost_seconds: float = 0.0) -> str:
    """One line about a finished run. cost_seconds: that measuring the cost of rounds took first."""
    seconds = output.seconds + cost_seconds
    # Rounds that look for a gap's length have branches of their own.
    auto = output.config.branches == "auto" and not output.gaps
    measured = f" ({cost_seconds:.2f} of them to measure rounds, once)" if cost_seconds else ""
    return " · ".join(
        (
            label(output.config) + (f" ({output.mean_branches:.1f} branches)" if auto else ""),
            f"{output.rounds} rounds",
            f"{output.tokens} tokens",
            f"TPF {output.tpf:.2f}",
            f"{output.tokens_per_second:.1f} tokens/s",
            f"{seconds:.2f} s{measured}",
            f"ended by {output.finish}",
        )
    )


def print_table(heads: Iterable[str], rows: Iterable[tuple[str, ...]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, header_style="dim")
    for head in heads:
        table.add_column(head, justify="right")
    for row in rows:
        table.add_row(*row)
    width = None if sys.stdout.isatty() else _FILE_WIDTH
    Console(highlight=False, markup=False, width=width).print(table)


def plain_table(*columns: str) -> Table:
    """A table of words; without names of columns it has no head."""
    from rich import box
    from rich.table import Table

    head = any(columns)
    table = Table(box=box.SIMPLE_HEAD if head else None, show_edge=False, show_header=head)
    for number, name in enumerate(columns):
        # The first column is never wrapped, so that it can be copied.
        table.add_column(name, style="" if number else "bold", no_wrap=not number, overflow="fold")
    return table


def print_rich(table: Table) -> None:
    from rich.console import Console

    Console(highlight=False, markup=False).print(table)


def count_text(number: int) -> str:
    for size, unit in ((10**9, " B"), (10**6, " M"), (10**3, " k")):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return str(number)


def bytes_text(number: int) -> str:
    for size, unit in ((2**30, "GiB"), (2**20, "MiB")):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number / 2**10:.1f} KiB"
