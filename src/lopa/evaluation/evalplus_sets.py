"""EvalPlus's sets as exercises: its problems, prompt, search for the code, and scoring.

EvalPlus's own scoring function runs as the judge of the sandbox: the reference solution, the
answer and every comparison happen in there, under its limits.
"""

from __future__ import annotations

import contextlib
import pickle
import sys
from functools import partial
from pathlib import Path
from typing import Any

from lopa.errors import ConfigError, LopaError
from lopa.evaluation.benchmark import Exercise, Scores
from lopa.evaluation.extras import require
from lopa.evaluation.rows import Row
from lopa.evaluation.sandbox import Judge, run

_SYSTEM = "You are an intelligent programming assistant to produce Python algorithmic solutions"
_USER = "Can you complete the following Python function?\n```python\n{prompt}\n```\n"
_FENCE = "```"
_SECONDS = 2 * 60.0  # EvalPlus's for all inputs of a problem, for the reference and the answer
_MEGABYTES = 4096  # EvalPlus's

# Runs in the sandbox. The limits on time by input are EvalPlus's.
_JUDGE = """
def prepare(payload):
    import contextlib, os, pickle
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    from evalplus import config, eval as scoring
    from evalplus.eval._special_oracle import MBPP_OUTPUT_NOT_NONE_TASKS
    from evalplus.gen.util import trusted_exec

    class Cell:
        value = 0

    class Unfit(Exception):
        pass

    scoring.create_tempdir = contextlib.nullcontext  # the sandbox has its own,
    scoring.reliability_guard = lambda **_: None  # is stricter,
    scoring.query_maximum_memory_bytes = lambda: None  # and has set a limit
    dataset, reference, entry_point, inputs, atol = pickle.loads(payload)
    loose = dataset == "mbpp" and entry_point in MBPP_OUTPUT_NOT_NONE_TASKS

    def judge(code):
        try:
            expected, times = trusted_exec(reference, inputs, entry_point, True, loose)
        except Exception:
            raise Unfit from None
        least, factor = config.DEFAULT_MIN_TIME_LIMIT, config.DEFAULT_GT_TIME_LIMIT_FACTOR
        limits = [max(least, factor * seconds) for seconds in times]
        ended, count, details = Cell(), Cell(), [False] * len(inputs)
        ended.value = None
        scoring.unsafe_execute(
            dataset, entry_point, code, inputs, expected, limits, atol, True, ended, details, count
        )
        assert ended.value == scoring._SUCCESS and all(details)

    return judge
"""


def plus_exercises(
    name: str, rows: list[Row] | None, limit: int | None, chat: bool
) -> list[Exercise]:
    dataset = name.removesuffix("+")
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
    reference = problem["prompt"] + problem["canonical_solution"]
    asked: tuple[Any, ...] = (dataset, reference, problem["entry_point"], problem[inputs])
    payload = pickle.dumps((*asked, problem["atol"]))
    folders = tuple(path for path in sys.path if Path(path).is_absolute() and Path(path).is_dir())
    outcome = run(code, _SECONDS, _MEGABYTES, Judge(_JUDGE, payload, folders))
    if outcome.reason == "Unfit":  # what the answer raises does not come through
        raise LopaError(
            f"the reference solution of {problem['task_id']} fails in the sandbox: see that the "
            "standard library can be read without being root, or leave the row out with --data"
        )
    return outcome.passed
