"""The public benchmarks by name: their rows and protocol become exercises.

How to decode is `DecodeConfig.preset` of the same name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lopa.config import DecodeConfig
from lopa.errors import ConfigError
from lopa.evaluation.benchmark import Benchmark
from lopa.evaluation.protocol import PROTOCOLS
from lopa.evaluation.rows import read_rows


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
    shots_data: rows that they are sampled from; by default they are other rows of `data`.
    """
    protocol = PROTOCOLS[name]
    shots = protocol.shots if shots is None else shots
    if limit is not None and limit < 1:
        raise ConfigError("limit must be at least 1")
    if shots < 0 or (shots and not protocol.shots):
        raise ConfigError(f"{name} is asked without examples: leave --shots out")
    if protocol.shots and not protocol.samples_rows and shots > protocol.shots:
        raise ConfigError(f"{name} has {protocol.shots} examples: ask for no more --shots")
    if shots_data is not None and not (protocol.samples_rows and data is not None):
        raise ConfigError("--shots-data goes with --data and a benchmark whose examples are rows")
    rows = None if data is None else read_rows(data, name, protocol.fields)
    examples = None if shots_data is None else read_rows(shots_data, name, protocol.fields)
    if rows is not None and protocol.samples_rows and shots > len(examples or rows[1:]):
        raise ConfigError(f"{shots} examples need more rows: give --shots-data, or fewer --shots")
    stop: tuple[str, ...] = ()
    if protocol.tasks:
        from lopa.evaluation.harness_tasks import harness_exercises

        exercises, stop = harness_exercises(name, protocol, rows, examples, shots, limit, chat)
    else:
        from lopa.evaluation.evalplus_sets import plus_exercises

        exercises = plus_exercises(name, rows, limit, chat)
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
