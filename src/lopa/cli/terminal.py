"""Writing to a terminal: text that a model or a stranger wrote, notes beside the answer, tables."""

from __future__ import annotations

import os
import sys
import unicodedata
from collections.abc import Iterable
from typing import TYPE_CHECKING

from lopa.distributed.launch import speaks

if TYPE_CHECKING:
    from rich.console import Console

    from lopa.engine.output import Output

# Invisible, but part of how words (Persian) and emoji are written.
_JOINERS = "\u200c\u200d"
_WIDE = 160  # columns of a table that nobody looks at


def visible(text: str, newline: str = "\n") -> str:
    """`text` with the characters that a terminal obeys, or hides, replaced by something to see.

    Escape sequences cannot move the cursor, and marks that reorder text cannot mislead. Tabs stay.
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
    """Text for standard output: a terminal gets it made visible, a file or pipe as it is."""
    return visible(text) if stream_is_terminal else text


def notes() -> Console:
    """A console on standard error, where everything but the answer goes."""
    from rich.console import Console

    quiet = None if speaks() else open(os.devnull, "w")  # noqa: SIM115 (for the whole run)
    return Console(stderr=True, file=quiet, highlight=False, markup=False)


def note(message: str) -> None:
    if speaks():
        print(message, file=sys.stderr)


def statistics(output: Output) -> str:
    """One line about a finished run."""
    return " · ".join(
        (
            output.config.decoder,
            f"{output.rounds} rounds",
            f"{output.tokens} tokens",
            f"TPF {output.tpf:.2f}",
            f"{output.tokens_per_second:.1f} tokens/s",
            f"{output.seconds:.2f} s",
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
    # A file or a pipe has no width that columns would have to be squeezed into.
    width = None if sys.stdout.isatty() else _WIDE
    Console(highlight=False, markup=False, width=width).print(table)
