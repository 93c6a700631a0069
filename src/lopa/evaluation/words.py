"""Grade-school word problems, answered step by step with the number after `####` at the end."""

import re

from lopa.evaluation.draw import Draw
from lopa.evaluation.problem import Problem
from lopa.evaluation.words_answer import Answer
from lopa.evaluation.words_plan import STRUCTURES, draw_plan
from lopa.evaluation.words_question import Question

__all__ = ["NAME", "STRUCTURES", "generate", "score"]

NAME = "words"
_NUMBER = re.compile(r"-?[0-9][0-9,]*(\.[0-9]+)?")


def generate(seed: int, split: str, wording: int = 0) -> Problem:
    """The problem of a seed. `wording` selects among different texts of the same answer."""
    draw = Draw(f"{NAME}/{split}/{seed}")
    plan = draw_plan(draw, split)
    prompt = Question(plan, draw).text()
    answer = Answer(plan, Draw(f"{NAME}/{split}/{seed}/answer/{wording}")).text()
    return Problem(NAME, seed, split, plan.structure, prompt, answer, (str(plan.result),))


def score(problem: Problem, text: str) -> bool:
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
