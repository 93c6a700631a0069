"""A line of a reference answer, hidden: what lies before and behind it is the task."""

from __future__ import annotations

from typing import NamedTuple

from lopa.tasks import functions, words
from lopa.tasks.problem import Problem
from lopa.tasks.rng import Rng


class HiddenLine(NamedTuple):
    """`prefix + line + suffix` is the problem's prompt and its answer."""

    prefix: str
    line: str
    suffix: str


def hide_line(problem: Problem) -> HiddenLine | None:
    """Of `functions` a line between the first and the last, of `words` a step; None: there is none.

    Which one depends on the problem's seed alone.
    """
    lines = problem.answer.split("\n")
    choices = {
        functions.NAME: [i for i in range(1, len(lines) - 1) if lines[i].strip()],
        words.NAME: [i for i in range(len(lines) - 1) if "=" in lines[i]],
    }[problem.task]
    if not choices:
        return None
    hidden = Rng(f"{problem.task}/{problem.split}/{problem.seed}/hidden").pick(choices)
    before = "".join(line + "\n" for line in lines[:hidden])
    behind = "".join("\n" + line for line in lines[hidden + 1 :])
    return HiddenLine(problem.prompt + before, lines[hidden], behind)
