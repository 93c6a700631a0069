"""Accuracy and parallelism of one setting on one task.

A report counts over all problems together: `tpf` is tokens (up to and including the end of text)
over rounds (the first one included), and the accuracy's interval is Wilson's at 95 %.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from lopa.config import DecodeConfig
from lopa.engine.llm import LLM
from lopa.engine.session import Output
from lopa.errors import ConfigError
from lopa.evaluation import tasks
from lopa.evaluation.problem import Problem
from lopa.evaluation.wilson import wilson

Progress = Callable[[int, int], None]  # problems done, problems in all


@dataclass(frozen=True, slots=True)
class Report:
    task: str
    split: str
    seed: int
    problems: int
    correct: int
    tokens: int
    tokens_paper: int
    rounds: int
    seconds: float
    unfinished: int  # answers cut off before their end of text
    batch_size: int
    decoder: str
    settings: dict[str, Any]

    @property
    def accuracy(self) -> float:
        return self.correct / self.problems

    @property
    def interval(self) -> tuple[float, float]:
        return wilson(self.correct, self.problems)

    @property
    def tpf(self) -> float:
        return self.tokens / self.rounds

    def summary(self) -> dict[str, Any]:
        """What `--json` prints."""
        return asdict(self) | {
            "accuracy": self.accuracy,
            "interval": list(self.interval),
            "tpf": self.tpf,
            "tpf_paper": self.tokens_paper / (self.rounds + self.problems),
            "tokens_per_second": self.tokens / self.seconds,
        }


def problems(task: str, split: str, limit: int, seed: int) -> list[Problem]:
    """The same `limit` problems for the same seed, always; another seed gives others."""
    if task not in tasks.TASKS:
        raise ConfigError(f"no task {task!r}: choose from {', '.join(tasks.TASKS)}")
    if split not in tasks.SPLITS:
        raise ConfigError(f"no split {split!r}: choose from {', '.join(tasks.SPLITS)}")
    if limit < 1 or seed < 0:
        raise ConfigError("limit must be at least 1 and seed at least 0")
    return [tasks.generate(task, seed * 1_000_003 + i, split) for i in range(limit)]


def evaluate(
    llm: LLM,
    task: str,
    config: DecodeConfig,
    *,
    split: str,
    limit: int,
    seed: int,
    batch_size: int,
    progress: Progress | None = None,
) -> tuple[Report, list[tuple[Problem, Output, bool]]]:
    """Decode and score; returns the report and every sample."""
    asked = problems(task, split, limit, seed)
    began = time.perf_counter()
    outputs: dict[int, Output] = {}
    prompts = [problem.prompt for problem in asked]
    for index, output in llm.generate_together(prompts, config, max_running=batch_size):
        outputs[index] = output
        if progress:
            progress(len(outputs), len(asked))
    seconds = time.perf_counter() - began
    answers = [outputs[i] for i in range(len(asked))]
    scores = tasks.score_all(asked, [answer.text for answer in answers])
    report = Report(
        task=task,
        split=split,
        seed=seed,
        problems=len(asked),
        correct=sum(scores),
        tokens=sum(answer.tokens for answer in answers),
        tokens_paper=sum(answer.tokens_paper for answer in answers),
        rounds=sum(answer.rounds for answer in answers),
        seconds=seconds,
        unfinished=sum(answer.finish not in ("eos", "stop") for answer in answers),
        batch_size=batch_size,
        decoder=config.decoder,
        settings=config.settings(),
    )
    return report, list(zip(asked, answers, scores, strict=True))
