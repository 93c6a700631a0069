"""Scores answers to the problems of the built-in tasks."""

from __future__ import annotations

import re

from lopa.evaluation.judge import judge
from lopa.tasks import functions, words
from lopa.tasks.problem import Problem

_NUMBER = re.compile(r"-?[0-9][0-9,]*(\.[0-9]+)?")


def score(problem: Problem, text: str) -> bool:
    """Whether the text solves the problem. Never raises for any text."""
    return _SCORERS[problem.task](problem, text)


def score_words(problem: Problem, text: str) -> bool:
    """Whether the number after the last `####` is the expected one.

    Spaces, a dollar sign, thousands commas and a trailing `.` or `.0` are tolerated; anything
    else on that line, like a second number, is not.
    """
    _, marker, tail = text.rpartition("####")
    if not marker:
        return False
    tail = tail.strip().partition("\n")[0]
    tail = tail.replace(" ", "").replace("$", "").rstrip(".")
    if _NUMBER.fullmatch(tail) is None:
        return False
    return float(tail.replace(",", "")) == float(problem.check[0])


def score_functions(problem: Problem, text: str) -> bool:
    """Whether the text, run as a program, passes the hidden asserts.

    The whole text counts: anything that follows the function is part of the program.
    """
    if not text.strip():
        return False
    return judge(text, "\n".join(problem.check)).passed


_SCORERS = {words.NAME: score_words, functions.NAME: score_functions}
