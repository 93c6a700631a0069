"""Figures in words: how the tables and the readings of the studies write them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def accuracy(figures: Mapping[str, Any]) -> str:
    low, high = figures["interval"]
    return f"{figures['accuracy']:.1%} ({low:.1%} … {high:.1%})"


def times(value: float, base: float) -> str:
    return f"{value / base:.2f} times" if base else "no multiple of"


def share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "no share"


def number(value: float | None) -> str:
    return "none" if value is None else f"{value:.2f}"


def points(value: float, base: float) -> str:
    """A difference of two shares, in points."""
    return f"{100 * (value - base):+.1f} points"
