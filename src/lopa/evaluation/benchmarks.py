"""The public benchmarks by name, asked and scored as the paper's evaluation did.

What that was is read from the evaluation scripts published with the paper: harness tasks and
examples, chat turns and the token in front for D2F-Dream, EvalPlus and its chat prompt for
D2F-DiffuCoder. How to decode is `DecodeConfig.preset` of the same name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lopa.config import DecodeConfig
from lopa.errors import ConfigError
from lopa.evaluation.benchmark import Benchmark, Exercise
from lopa.evaluation.rows import Row, read_rows

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
    drawn: bool = False  # the examples are rows, not fixed ones that the harness brings
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
        drawn=True,
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


def benchmark(
    name: str,
    *,
    chat: bool,
    data: Path | None = None,
    shots: int | None = None,
    shots_data: Path | None = None,
    limit: int | None = None,
) -> Benchmark:
    """The exercises of a public benchmark.

    data: its rows, in place of those on the hub. shots: examples before the question, and
    shots_data: rows that they are drawn from; by default they are other rows of `data`.
    """
    protocol = PROTOCOLS[name]
    shots = protocol.shots if shots is None else shots
    if limit is not None and limit < 1:
        raise ConfigError("limit must be at least 1")
    if shots < 0 or (shots and not protocol.shots):
        raise ConfigError(f"{name} is asked without examples: leave --shots out")
    if protocol.shots and not protocol.drawn and shots > protocol.shots:
        raise ConfigError(f"{name} has {protocol.shots} examples: ask for no more --shots")
    if shots_data is not None and not (protocol.drawn and data is not None):
        raise ConfigError("--shots-data goes with --data and a benchmark whose examples are rows")
    rows = None if data is None else read_rows(data, name, protocol.fields)
    examples = None if shots_data is None else read_rows(shots_data, name, protocol.fields)
    if rows is not None and protocol.drawn and shots > len(examples or rows[1:]):
        raise ConfigError(f"{shots} examples need more rows: give --shots-data, or fewer --shots")
    exercises, stop = _exercises(name, protocol, rows, examples, shots, limit, chat)
    facts: dict[str, Any] = {"shots": shots, "chat": chat, "data": data.name if data else "hub"}
    said = [name, *([f"{shots} shots"] if shots else []), *(["chat"] if chat else [])]
    return Benchmark(
        name=name,
        exercises=exercises,
        title=", ".join([*said, f"{len(exercises)} problems"]),
        facts=facts,
        room=DecodeConfig.preset(name).max_new_tokens,
        stop=stop,
        bos=protocol.bos,
    )


def _exercises(
    name: str,
    protocol: Protocol,
    rows: list[Row] | None,
    examples: list[Row] | None,
    shots: int,
    limit: int | None,
    chat: bool,
) -> tuple[list[Exercise], tuple[str, ...]]:
    if not protocol.tasks:
        from lopa.evaluation.plus import plus_exercises

        return plus_exercises(name, rows, limit, chat), ()
    from lopa.evaluation.harness_tasks import harness_exercises

    return harness_exercises(name, protocol, rows, examples, shots, limit, chat)
