"""The code in an answer, by EvalPlus: the function that is asked for and what it needs."""

from __future__ import annotations

from evalplus.sanitize import sanitize as _sanitize


def sanitize(text: str, entry_point: str) -> str:
    """The code; the text itself where Python's parser cannot even look at it."""
    try:
        found: str = _sanitize(text, entry_point)
    except (ValueError, RecursionError):  # a null byte, a lone surrogate, brackets without end
        return text
    return found
