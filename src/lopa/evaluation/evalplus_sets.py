"""EvalPlus's sets as exercises: its problems, prompt, search for the code, and scoring.

EvalPlus's own scoring runs in the tester (`sandbox/plus_tester.py`), with the reference solution
and every comparison. The answer runs in the other process, under EvalPlus's limits.
"""

from __future__ import annotations

import contextlib
import os
import sys
from functools import cache, partial
from typing import Any

from lopa.errors import ConfigError
from lopa.evaluation.benchmark import Exercise, Scores
from lopa.evaluation.extras import require
from lopa.evaluation.judge import check_isolation, judge_plus
from lopa.evaluation.rows import Row
from lopa.evaluation.sandbox.zygote_client import Kit

_SYSTEM = "You are an intelligent programming assistant to produce Python algorithmic solutions"
_USER = "Can you complete the following Python function?\n```python\n{prompt}\n```\n"
_FENCE = "```"
_SECONDS = 60.0  # EvalPlus's for all inputs of a problem
_TESTER = ("evalplus.eval", "evalplus.gen.util", "lopa.evaluation.sandbox.plus_tester")
_MEGABYTES = 4096  # EvalPlus's


def plus_exercises(
    name: str, rows: list[Row] | None, limit: int | None, chat: bool
) -> list[Exercise]:
    dataset = name.removesuffix("+")
    check_isolation()
    return [_exercise(dataset, problem, chat) for problem in _problems(name, rows)[:limit]]


def _problems(name: str, rows: list[Row] | None) -> list[Row]:
    data = require("evalplus.data", "evalplus", name)
    require("evalplus.sanitize", "evalplus", name)
    if rows is None:
        fetch = data.get_human_eval_plus if name == "humaneval+" else data.get_mbpp_plus
        try:
            with contextlib.redirect_stdout(sys.stderr):  # it says what it fetches
                return list(fetch().values())
        except OSError as error:
            raise ConfigError(
                f"the rows of {name} could not be fetched ({error}): give them with --data FILE"
            ) from error
    if name == "humaneval+":
        return rows
    from evalplus.data.mbpp import mbpp_deserialize_inputs

    inputs = ("base_input", "plus_input")
    try:
        return [
            row | {f: mbpp_deserialize_inputs(row["task_id"], row[f]) for f in inputs}
            for row in rows
        ]
    except (ValueError, TypeError, IndexError) as error:
        raise ConfigError(f"the rows of {name} cannot be used ({error})") from error


def _exercise(dataset: str, problem: Row, chat: bool) -> Exercise:
    score = partial(_score, dataset, problem)
    if not chat:
        return Exercise(problem["prompt"], score)
    asked = _USER.format(prompt=problem["prompt"].strip())
    messages = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": asked}]
    return Exercise(messages, score, opening=f"{_FENCE}python\n")


def _score(dataset: str, problem: Row, text: str) -> Scores:
    """Whether it passes all tests, and whether it passes those of the original set."""
    from lopa.evaluation.sanitize import sanitize

    code = sanitize(problem["prompt"] + text.partition(_FENCE)[0], problem["entry_point"])
    base = passes(dataset, problem, "base_input", code)
    return {"plus": base and passes(dataset, problem, "plus_input", code), "base": base}


def passes(dataset: str, problem: Row, inputs: str, code: str) -> bool:
    tests: dict[str, Any] = {
        "dataset": dataset,
        "reference": problem["prompt"] + problem["canonical_solution"],
        "entry_point": problem["entry_point"],
        "inputs": problem[inputs],
        "atol": problem["atol"],
    }
    tester, answer = _kits()
    limits: dict[str, Any] = {"seconds": _SECONDS, "megabytes": _MEGABYTES}
    return judge_plus(code, tests, tester=tester, kit=answer, **limits).passed


@cache
def _kits() -> tuple[Kit, Kit]:
    """Of the tester, which needs EvalPlus and all that it imports, and of answers: numpy alone."""
    paths = tuple(path for path in sys.path if os.path.isabs(path) and os.path.isdir(path))
    package = os.path.dirname(require("numpy", "evalplus", "scoring").__file__)
    libraries = (package, f"{package}.libs")
    numpy = Kit(("numpy",), (os.path.dirname(package),), tuple(filter(os.path.isdir, libraries)))
    return Kit(_TESTER, paths, paths), numpy
