"""Sets of characters, as sorted ranges of code points that neither overlap nor touch.

Surrogates are no characters: UTF-8 cannot hold them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

CharSet: TypeAlias = tuple[tuple[int, int], ...]  # both ends are in it

LAST = 0x10FFFF
EVERY: CharSet = ((0, 0xD7FF), (0xE000, LAST))


def of(characters: Iterable[str | int]) -> CharSet:
    points = (ord(c) if isinstance(c, str) else c for c in characters)
    return union((point, point) for point in points)


def union(ranges: Iterable[tuple[int, int]]) -> CharSet:
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(high, merged[-1][1])
        else:
            merged.append((low, high))
    return tuple(merged)


def intersection(a: CharSet, b: CharSet) -> CharSet:
    found, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        low, high = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if low <= high:
            found.append((low, high))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return tuple(found)


def complement(chars: CharSet) -> CharSet:
    gaps, low = [], 0
    for first, last in chars:
        if low < first:
            gaps.append((low, first - 1))
        low = last + 1
    if low <= LAST:
        gaps.append((low, LAST))
    return intersection(tuple(gaps), EVERY)


def points(chars: CharSet) -> Iterable[int]:
    for low, high in chars:
        yield from range(low, high + 1)
