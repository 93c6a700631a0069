"""The harness's metric for code, by this project's judge.

The harness scores code with `evaluate`'s metric code_eval, which it fetches from the network and
which runs the code with little in its way. This one needs no network and runs it behind walls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import comb
from typing import Any

import evaluate
from lopa.evaluation.judge import Outcome, code_of_prompt, judge

# Tests of HumanEval → its prompt and the name of the function. The harness hands over the tests
# alone, some of which use helpers of the prompt.
_PROMPTS: dict[str, tuple[str, str]] = {}


def remember(doc: Mapping[str, Any]) -> None:
    """The prompt of a row of HumanEval; other rows have none."""
    if {"prompt", "test", "entry_point"} <= doc.keys():
        tests = f"{doc['test']}\ncheck({doc['entry_point']})"
        _PROMPTS[tests] = (code_of_prompt(doc["prompt"]), doc["entry_point"])


def _judged(candidate: str, tests: str) -> Outcome:
    given, entry_point = _PROMPTS.get(tests, ("", ""))
    return judge(candidate, tests, given=given, entry_point=entry_point)


class CodeEval:
    """Stands in for the metric: `compute` is what the harness calls."""

    def compute(
        self,
        *,
        references: Sequence[str],
        predictions: Sequence[Sequence[str]],
        k: Sequence[int] = (1,),
    ) -> tuple[dict[str, float], dict[int, list[str]]]:
        """Mean pass@k over the problems, and by problem how each candidate ended."""
        outcomes = [
            [_judged(candidate, reference) for candidate in candidates]
            for candidates, reference in zip(predictions, references, strict=True)
        ]
        ended = {i: [outcome.reason for outcome in found] for i, found in enumerate(outcomes)}
        counts = [(len(found), sum(o.passed for o in found)) for found in outcomes]
        shares = {
            f"pass@{n}": sum(_pass_at(n, *count) for count in counts) / len(counts) for n in k
        }
        return shares, ended


def _pass_at(k: int, total: int, passed: int) -> float:
    """How likely one of k sampled candidates passes."""
    return 1.0 - comb(total - passed, k) / comb(total, k)


def install() -> None:
    """Give CodeEval to whoever asks `evaluate` for code_eval from now on."""
    others = evaluate.load

    def load(path: str, *arguments: Any, **options: Any) -> Any:
        return CodeEval() if path == "code_eval" else others(path, *arguments, **options)

    if others.__module__ != __name__:
        evaluate.load = load
