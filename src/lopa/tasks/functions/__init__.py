"""Small Python functions described in words, answered with code alone, scored by hidden asserts."""

from lopa.tasks.functions.code import Code
from lopa.tasks.functions.spec import STRUCTURES, FunctionSpec, pick_spec
from lopa.tasks.problem import Problem
from lopa.tasks.rng import Rng

__all__ = ["NAME", "STRUCTURES", "generate"]

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
    rng = Rng(f"{NAME}/{split}/{seed}")
    spec = pick_spec(rng, split)
    prompt = f"{_description(spec, rng)}\n{spec.example}\n"
    answer = Code(spec, Rng(f"{NAME}/{split}/{seed}/answer/{wording}")).text()
    return Problem(NAME, seed, split, spec.structure, prompt, answer, spec.asserts)


def _description(spec: FunctionSpec, rng: Rng) -> str:
    signature = f"{spec.name}({spec.argument})"
    nouns = rng.skewed(spec.source.nouns).format(a=spec.argument)
    kept = rng.skewed(spec.predicate.phrases).format(N=nouns, k=spec.predicate_literal)
    if rng.chance(0.6):
        changed = rng.skewed(spec.map.phrases).format(P=kept, k=spec.map_literal)
        what = rng.skewed(spec.reduction.phrases).format(P=changed, k=spec.reduction_literal)
        return rng.skewed(_REQUESTS).format(f=signature, what=what)
    orders = [rng.skewed(_KEEPS).format(P=kept)]
    if spec.map.codes:
        orders.append(rng.skewed(spec.map.orders).format(k=spec.map_literal))
    orders.append(rng.skewed(spec.reduction.orders).format(k=spec.reduction_literal))
    what = ", ".join(orders[:-1]) + rng.skewed((" and ", ", then ")) + orders[-1]
    return rng.skewed(_ORDERS).format(f=signature, what=what, What=what[0].upper() + what[1:])
