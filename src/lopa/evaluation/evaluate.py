"""Decode the exercises of a benchmark, score the answers, and report on them.

Everything a report says is read from the samples, so a run that was interrupted and run again
reports the same as one that was not.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

from lopa import tasks
from lopa.config import DecodeConfig
from lopa.engine.llm import LLM
from lopa.errors import ConfigError
from lopa.evaluation.benchmark import Benchmark, Exercise
from lopa.evaluation.judge import check_isolation
from lopa.evaluation.sample import Sample, Samples, figures, make_sample
from lopa.evaluation.scoring import score, score_filled
from lopa.tasks import functions
from lopa.tasks.infill import HiddenLine, hide_line
from lopa.tasks.problem import Problem

LINE_ROOM = 40  # tokens: what a line of an answer may need

Tick = Callable[[], None]  # called after every answer


def problems(task: str, split: str, limit: int, seed: int) -> list[Problem]:
    """The same `limit` problems for the same seed, always; another seed gives others."""
    if task not in tasks.TASKS:
        raise ConfigError(f"no task {task!r}: choose from {', '.join(tasks.TASKS)}")
    if split not in tasks.SPLITS:
        raise ConfigError(f"no split {split!r}: choose from {', '.join(tasks.SPLITS)}")
    if limit < 1 or seed < 0:
        raise ConfigError("limit must be at least 1 and seed at least 0")
    return [tasks.generate(task, seed * 1_000_003 + i, split) for i in range(limit)]


def built_in(task: str, split: str, limit: int, seed: int) -> Benchmark:
    """Problems of a built-in task."""

    if task == functions.NAME:
        check_isolation()

    def exercise(problem: Problem) -> Exercise:
        return Exercise(problem.prompt, lambda text: {"correct": score(problem, text)})

    return Benchmark(
        name=task,
        exercises=[exercise(problem) for problem in problems(task, split, limit, seed)],
        title=f"{task}, {split}, {limit} problems, seed {seed}",
        facts={"split": split, "seed": seed},
        room=tasks.ROOM,
    )


def infilling(task: str, split: str, limit: int, seed: int, *, true_length: bool) -> Benchmark:
    """Problems of a built-in task with a line of the reference answer hidden.

    Those without a line to hide are left out. true_length: the gap has the line's own number of
    tokens; else its length is searched.
    """
    if task == functions.NAME:
        check_isolation()
    exercises: list[Exercise] = []
    problems(task, split, limit, seed)  # checks the arguments
    for number in itertools.count():
        if len(exercises) == limit:
            break
        problem = tasks.generate(task, seed * 1_000_003 + number, split)
        hidden = hide_line(problem)
        if hidden is not None:
            exercises.append(_infill_exercise(problem, hidden, true_length))
    length = "true" if true_length else "searched"
    return Benchmark(
        name=task,
        exercises=exercises,
        title=f"{task}, {split}, {limit} hidden lines, {length} length, seed {seed}",
        facts={"split": split, "seed": seed, "infill": length},
        room=LINE_ROOM,
    )


def _infill_exercise(problem: Problem, hidden: HiddenLine, true_length: bool) -> Exercise:
    return Exercise(
        hidden.prefix,
        lambda text: {"correct": score_filled(problem, hidden, text)},
        suffix=hidden.suffix,
        hidden=hidden.line if true_length else None,
    )


def answer(
    llm: LLM,
    benchmark: Benchmark,
    config: DecodeConfig,
    samples: Samples,
    *,
    setting: str,
    batch_size: int,
    tick: Tick,
) -> None:
    """Decode and score the exercises that have no sample of this setting yet."""
    asked = benchmark.exercises
    todo = [i for i in range(len(asked)) if (setting, i) not in samples.samples]
    prompts = [asked[i].encode(llm, benchmark.bos) for i in todo]
    began = time.perf_counter()
    for index, output in llm.generate_as_completed(prompts, config, max_running=batch_size):
        elapsed = time.perf_counter() - began
        number = todo[index]
        scores = asked[number].score(output.text)
        right = next(iter(scores.values()))
        more = scores if len(scores) > 1 else None
        sample = make_sample(setting, number, right, output, elapsed=elapsed, scores=more)
        samples.add([sample])
        tick()
        began = time.perf_counter()  # nothing is decoded while an answer is scored


def report(
    benchmark: Benchmark, config: DecodeConfig, samples: list[Sample], batch_size: int
) -> dict[str, Any]:
    """What `--json` prints."""
    return {
        **benchmark.described(),
        **figures(samples),
        "seconds": sum(sample.elapsed for sample in samples),
        "batch_size": batch_size,
        "decoder": config.decoder,
        "settings": config.settings(),
    }


def evaluate(
    llm: LLM,
    task: str,
    config: DecodeConfig,
    *,
    split: str,
    limit: int,
    seed: int,
    batch_size: int,
) -> tuple[dict[str, Any], list[Sample]]:
    """The report of one setting on a built-in task, and every sample."""
    benchmark = built_in(task, split, limit, seed)
    samples = Samples()
    answer(llm, benchmark, config, samples, setting="", batch_size=batch_size, tick=lambda: None)
    found = samples.of("", limit)
    return report(benchmark, config, found, batch_size), found
