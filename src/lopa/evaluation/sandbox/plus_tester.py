"""EvalPlus's own scoring, in the tester: inputs, reference solution, tolerances and special cases.

It is unchanged, but for the function under test, which is called in the answer's process, and for
its limits on time by input, which count the answer's CPU seconds.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from lopa.evaluation.sandbox.link import Link, UnfitError

_ANSWER = "answer"  # a module that holds the function under test


class _Cell:
    value: int | None = 0


def judge_plus(
    link: Link,
    *,
    dataset: str,
    reference: str,
    entry_point: str,
    inputs: list[list[Any]],
    atol: float,
) -> None:
    from evalplus import config
    from evalplus import eval as scoring
    from evalplus.eval._special_oracle import MBPP_OUTPUT_NOT_NONE_TASKS
    from evalplus.gen.util import trusted_exec

    @contextlib.contextmanager
    def limit(seconds: float) -> Iterator[None]:
        link.seconds = seconds
        yield

    scoring.create_tempdir = contextlib.nullcontext  # the walls are around this already
    scoring.reliability_guard = lambda **_: None
    scoring.query_maximum_memory_bytes = lambda: None
    scoring.time_limit = limit
    link.changes_arguments = False  # what special cases compare with are the inputs as they were
    loose = dataset == "mbpp" and entry_point in MBPP_OUTPUT_NOT_NONE_TASKS
    try:
        expected, times = trusted_exec(reference, inputs, entry_point, True, loose)
    except Exception as error:
        raise UnfitError(
            f"the reference solution fails ({type(error).__name__}: {error})"
        ) from None
    answer = ModuleType(_ANSWER)
    setattr(answer, entry_point, link.name(entry_point))
    sys.modules[_ANSWER] = answer
    least, factor = config.DEFAULT_MIN_TIME_LIMIT, config.DEFAULT_GT_TIME_LIMIT_FACTOR
    limits = [max(least, factor * seconds) for seconds in times]
    ended, count, details = _Cell(), _Cell(), [False] * len(inputs)
    ended.value = None
    code = f"from {_ANSWER} import {entry_point}"
    scoring.unsafe_execute(
        dataset, entry_point, code, inputs, expected, limits, atol, True, ended, details, count
    )
    assert ended.value == scoring._SUCCESS
    assert all(details)
