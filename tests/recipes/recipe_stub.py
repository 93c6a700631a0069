"""A task small enough to be learnt in seconds: stands in for lopa.tasks."""

from __future__ import annotations

import random

from lopa.tasks.problem import Problem

_THINGS = ("apples", "books", "coins", "hats")


def generate(task: str, seed: int, split: str) -> Problem:
    draw = random.Random(f"{task}/{seed}/{split}")
    first, second, thing = draw.randint(1, 9), draw.randint(1, 9), draw.choice(_THINGS)
    prompt = f"Ann has {first} {thing} and gets {second} more. How many {thing} does she have?\n"
    total = str(first + second)
    opening = draw.choice(("Ann has", "Now she has", "Together that is"))
    answer = f"{opening} {first} + {second} = {total} {thing}.\n#### {total}"
    return Problem(task, seed, split, "sum", prompt, answer, (total,))


def score(problem: Problem, text: str) -> bool:
    return text.rpartition("#### ")[2].strip() == problem.check[0]
