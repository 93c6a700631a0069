"""The record every task produces and every scorer reads."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """One generated problem.

    `answer` is one correct answer among many possible wordings; scoring never compares with it.
    `check` is what scoring needs: for `words` one number as text, for `functions` the hidden
    assert lines.
    """

    task: str
    seed: int
    split: str
    structure: str
    prompt: str
    answer: str
    check: tuple[str, ...]
