"""Automata over bytes: a text's characters in UTF-8."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lopa.grammar.automaton import Dfa, StateArray, distinct_columns, too_large
from lopa.grammar.charset import LAST
from lopa.types import BoolArray

MAX_STATES = 20_000
_RUN = 64  # characters that differ in their last byte alone


@dataclass(frozen=True, eq=False)
class ByteDfa:
    """State 0 is the start; every state is on the way to an accepting one."""

    class_of: npt.NDArray[np.uint8]  # [256]
    next: StateArray  # [states, classes]; -1: not allowed
    accepting: BoolArray  # [states]

    def accepts(self, text: bytes) -> bool:
        state = 0
        for byte in text:
            state = int(self.next[state, self.class_of[byte]])
            if state < 0:
                return False
        return bool(self.accepting[state])


def to_bytes(dfa: Dfa) -> ByteDfa:
    """The same texts in UTF-8.

    All characters of the same leading bytes are a node. What a node leads to from a state depends
    on the classes of its characters alone, and few nodes differ in them.
    """
    # One more class, from which there is no way on: of what is in no other, surrogates too.
    class_of = np.full(LAST + 1, len(dfa.classes), np.int32)
    for number, chars in enumerate(dfa.classes):
        for low, high in chars:
            class_of[low : high + 1] = number
    # Runs of 64 characters; runs of 64 of those; and runs of 64 of those again.
    runs, run_of = _distinct(class_of.reshape(-1, _RUN))
    pages, page_of = _distinct(run_of.reshape(-1, _RUN))
    padded = np.full(5 * _RUN, -1, np.int32)  # F0 to F4 could hold more than there are
    padded[: len(page_of)] = page_of
    planes = padded.reshape(-1, _RUN)
    # E0 and F0 are followed by what shorter forms cannot hold.
    first_page = run_of[:_RUN].copy()
    first_page[: 0x800 // _RUN] = -1
    first_plane = planes[0].copy()
    first_plane[: 0x10000 // _RUN**2] = -1

    made: dict[tuple[int, bytes], int] = {}
    inner: list[StateArray] = []  # rows of 64 following states each

    def node(level: int, row: StateArray) -> int:
        """The state in which `row` says what each of the 64 last bytes leads to."""
        if (row < 0).all():
            return -1
        key = level, row.tobytes()
        if key not in made:
            made[key] = len(dfa.next) + len(inner)
            if made[key] >= MAX_STATES:
                raise too_large(f"more than {MAX_STATES} states")
            inner.append(row)
        return made[key]

    beyond = [i for i, chars in enumerate(dfa.classes) if chars[-1][1] >= 0x80]
    rows = np.full((len(dfa.next), 256), -1, np.int32)
    following = np.pad(dfa.next, ((0, 0), (0, 1)), constant_values=-1)
    rows[:, :0x80] = following[:, class_of[:0x80]]
    for state in np.nonzero((following[:, beyond] >= 0).any(axis=1))[0].tolist():
        step = following[state]
        of_run = _nodes(node, 1, step[runs])
        of_page = _nodes(node, 2, of_run[pages])
        rows[state, 0xC2:0xE0] = of_run[run_of[2:32]]
        rows[state, 0xE0] = node(2, of_run[first_page])
        rows[state, 0xE1:0xF0] = of_page[page_of[1:16]]
        rows[state, 0xF0] = node(3, of_page[first_plane])
        rows[state, 0xF1:0xF5] = _nodes(node, 3, of_page[planes[1:]])[:-1]
    table = np.full((len(rows) + len(inner), 256), -1, np.int32)
    table[: len(rows)] = rows
    if inner:
        table[len(rows) :, 0x80:0xC0] = np.stack(inner)
    columns, class_of_byte = distinct_columns(table)
    accepting = np.append(dfa.accepting, np.zeros(len(inner), np.bool_))
    return ByteDfa(class_of_byte.astype(np.uint8), columns, accepting)


def _distinct(rows: StateArray) -> tuple[StateArray, StateArray]:
    """The rows that differ, and of each row which of them it is."""
    # Most rows have one value throughout; only the others are compared as a whole.
    index = rows[:, 0].copy()
    keys: dict[bytes, int] = {}
    count = int(index.max()) + 1
    for row in np.nonzero((rows != rows[:, :1]).any(axis=1))[0].tolist():
        index[row] = count + keys.setdefault(rows[row].tobytes(), len(keys))
    first = np.full(count + len(keys), -1)
    first[index[::-1]] = np.arange(len(rows))[::-1]
    used = first >= 0
    return rows[first[used]], (np.cumsum(used) - 1).astype(np.int32)[index]


def _nodes(node: Callable[[int, StateArray], int], level: int, rows: StateArray) -> StateArray:
    """[rows + 1] the nodes of `rows`; the last, which index -1 finds, is none."""
    return np.array([*(node(level, row) for row in rows), -1], np.int32)
