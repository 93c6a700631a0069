"""Small Python functions described in words, answered with code alone, scored by hidden asserts."""

from lopa.evaluation.draw import Draw
from lopa.evaluation.functions_code import Code
from lopa.evaluation.functions_plan import STRUCTURES, Plan, draw_plan
from lopa.evaluation.problem import Problem
from lopa.evaluation.sandbox import run

__all__ = ["NAME", "STRUCTURES", "generate", "score"]

NAME = "functions"

_REQUESTS = (
    "Write a function {f} that returns {what}.",
    "Write a Python function {f} to return {what}.",
    "Define {f} so that it returns {what}.",
    "Create a function {f} which gives back {what}.",
    "The function {f} should return {what}. Write it.",
)
_ORDERS = (
    "Write a function {f}: {what}.",
    "Write a Python function {f}. {What}.",
    "Define {f}. {What}.",
    "Implement {f} as follows: {what}.",
)
_KEEPS = ("take {P}", "keep only {P}", "select {P}", "consider {P}")


def generate(seed: int, split: str, wording: int = 0) -> Problem:
    """The problem of a seed. `wording` selects among different codes for the same function."""
    draw = Draw(f"{NAME}/{split}/{seed}")
    plan = draw_plan(draw, split)
    prompt = f"{_description(plan, draw)}\n{plan.example}\n"
    answer = Code(plan, Draw(f"{NAME}/{split}/{seed}/answer/{wording}")).text()
    return Problem(NAME, seed, split, plan.structure, prompt, answer, plan.asserts)


def score(problem: Problem, text: str) -> bool:
    """Whether the text, run as a program, passes the hidden asserts.

    The whole text counts: anything that follows the function is part of the program.
    """
    if not text.strip():
        return False
    return run("\n".join([text, "", *problem.check])).passed


def _description(plan: Plan, draw: Draw) -> str:
    signature = f"{plan.name}({plan.argument})"
    nouns = draw.skewed(plan.source.nouns).format(a=plan.argument)
    kept = draw.skewed(plan.predicate.phrases).format(N=nouns, k=plan.predicate_literal)
    if draw.chance(0.6):
        changed = draw.skewed(plan.map.phrases).format(P=kept, k=plan.map_literal)
        what = draw.skewed(plan.reduction.phrases).format(P=changed, k=plan.reduction_literal)
        return draw.skewed(_REQUESTS).format(f=signature, what=what)
    orders = [draw.skewed(_KEEPS).format(P=kept)]
    if plan.map.codes:
        orders.append(draw.skewed(plan.map.orders).format(k=plan.map_literal))
    orders.append(draw.skewed(plan.reduction.orders).format(k=plan.reduction_literal))
    what = ", ".join(orders[:-1]) + draw.skewed((" and ", ", then ")) + orders[-1]
    return draw.skewed(_ORDERS).format(f=signature, what=what, What=what[0].upper() + what[1:])
