"""How the paper's evaluation asks and scores each public benchmark.

Read from the evaluation scripts published with the paper: harness tasks and examples, chat turns
and the token in front for D2F-Dream, EvalPlus and its chat prompt for D2F-DiffuCoder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_DREAM_BOS = "<|beginoftext|>"
_PLUS = (
    *("task_id", "prompt", "entry_point", "canonical_solution"),
    *("base_input", "plus_input", "atol"),
)
_MATH = "algebra counting_and_prob geometry intermediate_algebra num_theory prealgebra precalc"


@dataclass(frozen=True, slots=True)
class Protocol:
    """How a benchmark is asked and scored."""

    fields: tuple[str, ...]  # that its rows need
    tasks: tuple[str, ...] = ()  # the harness's, in this order; none: a set of EvalPlus
    folder: str = ""  # of the harness's tasks
    score: str = ""  # the harness's metric and filter that counts
    shots: int = 0
    samples_rows: bool = False  # examples are sampled rows, not the harness's fixed ones
    chat: bool = True  # examples and question are turns, where the model has a template
    cut: bool = True  # the answer ends at the harness's stop strings
    bos: str = _DREAM_BOS


PROTOCOLS: Mapping[str, Protocol] = {
    "gsm8k": Protocol(
        fields=("question", "answer"),
        tasks=("gsm8k",),
        folder="gsm8k",
        score="exact_match,flexible-extract",
        shots=4,
        samples_rows=True,
    ),
    "math": Protocol(
        fields=("problem", "solution"),
        tasks=tuple(f"minerva_math_{subject}" for subject in _MATH.split()),
        folder="minerva_math",
        score="math_verify,none",
        shots=4,
    ),
    # Completed as text, to the end; then what is code in it is looked for.
    "humaneval": Protocol(
        fields=("task_id", "prompt", "test", "entry_point"),
        tasks=("humaneval",),
        folder="humaneval",
        score="pass@1,sanitized",
        chat=False,
        cut=False,
    ),
    "mbpp": Protocol(
        fields=("text", "test_list"),
        tasks=("mbpp",),
        folder="mbpp",
        score="pass_at_1,none",
        shots=3,
    ),
    "humaneval+": Protocol(fields=_PLUS, bos=""),
    "mbpp+": Protocol(fields=_PLUS, bos=""),
}
