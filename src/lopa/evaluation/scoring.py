"""Scores answers to the problems of the built-in tasks."""

from __future__ import annotations

import ast
import json
import operator
import re
from collections.abc import Callable

from lopa.evaluation.judge import judge
from lopa.tasks import functions, words
from lopa.tasks.infill import HiddenLine
from lopa.tasks.problem import Problem

# A step's last equation: numbers and operators, and the result.
_EQUATION = re.compile(r"([(0-9][0-9 +*/x()-]*?)\s*=\s*\$?([0-9]+)(?!.*=)")
_SIGNS = {"plus": "+", "minus": "-", "times": "*", "divided by": "/"}
_NUMBER = re.compile(r"-?[0-9][0-9,]*(\.[0-9]+)?")


def score_filled(problem: Problem, hidden: HiddenLine, text: str) -> bool:
    """Whether the text, in place of the hidden line, solves the problem. Never raises."""
    if problem.task == words.NAME:
        return score_step(hidden.line, text)
    whole = hidden.prefix.removeprefix(problem.prompt) + text + hidden.suffix
    return score(problem, whole)


def score_step(reference: str, text: str) -> bool:
    """Whether a step comes to the result of the reference, by an equation that holds.

    The answer behind a hidden step is visible, so it cannot tell.
    """
    expected, found = (_EQUATION.search(_in_signs(line)) for line in (reference, text))
    if expected is None or found is None or "\n" in text:
        return False
    return found[2] == expected[2] and _value(found[1]) == int(found[2])


def _in_signs(line: str) -> str:
    for word, sign in _SIGNS.items():
        line = line.replace(f" {word} ", f" {sign} ")
    return line


def _value(expression: str) -> float | None:
    """Of numbers and the four operations; None where it has none."""
    try:
        tree = ast.parse(expression.replace("x", "*"), mode="eval")
        return _computed(tree.body)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError):
        return None


def _computed(node: ast.AST) -> float:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_computed(node.left), _computed(node.right))
    raise ValueError(ast.dump(node))


_OPERATIONS: dict[type, Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def score(problem: Problem, text: str) -> bool:
    """Whether the text solves the problem. Never raises for any text."""
    return _SCORERS[problem.task](problem, text)


def score_words(problem: Problem, text: str) -> bool:
    """Whether the number after the last `####` is the expected one.

    Of a JSON object, which an answer with a schema may be, the last value has to be it. Spaces, a
    dollar sign, thousands commas and a trailing `.` or `.0` are tolerated; anything else on that
    line, like a second number, is not.
    """
    marker, tail = _last_value(text) if text.startswith("{") else text.rpartition("####")[1:]
    if not marker:
        return False
    tail = tail.strip().partition("\n")[0]
    tail = tail.replace(" ", "").replace("$", "").rstrip(".")
    if _NUMBER.fullmatch(tail) is None:
        return False
    return float(tail.replace(",", "")) == float(problem.check[0])


def _last_value(text: str) -> tuple[bool, str]:
    """Of a JSON object: whether it is one, and the value of its last key."""
    try:
        found = json.loads(text)
    except ValueError:
        return False, ""
    return bool(found), str(next(reversed(found.values()), ""))


def score_functions(problem: Problem, text: str) -> bool:
    """Whether the text, run as a program, passes the hidden asserts.

    The whole text counts: anything that follows the function is part of the program.
    """
    if not text.strip():
        return False
    return judge(text, "\n".join(problem.check)).passed


_SCORERS = {words.NAME: score_words, functions.NAME: score_functions}
