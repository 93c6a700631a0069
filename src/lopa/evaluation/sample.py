"""One answer of an evaluation as it is kept, and what many of them come to.

A file of samples is JSON Lines: a first line that says what was run, then a line an answer. It is
only ever added to, so a run that was stopped goes on where it was; a line cut short by the stop is
decoded again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from lopa.engine.output import Output
from lopa.errors import ConfigError, LopaError
from lopa.evaluation.wilson import wilson


@dataclass(frozen=True, slots=True)
class Sample:
    """`by_round` is what each round brought: its fills, and the lookahead tokens that won.

    Seconds are those of the answer's own rounds. `elapsed` is the time since the answer before it
    was ready, or decoding began: with several at once they add up to the time for all.
    """

    setting: str  # which of the settings of the run
    problem: int
    correct: bool
    text: str
    tokens: int
    tokens_paper: int
    rounds: int
    seconds: float
    first_round_seconds: float
    finish: str
    by_round: tuple[int, ...]
    branches: tuple[int, ...]  # lookaheads tried in each round
    forwarded: tuple[int, ...]  # tokens of all rows of each round
    elapsed: float = 0.0
    scores: dict[str, bool] = field(default_factory=dict)  # where there is more than one
    prompt: str = ""  # token by token, as the model was given it
    notes: dict[str, Any] | None = None  # of a decoder that observes itself


def make_sample(
    setting: str,
    problem: int,
    correct: bool,
    output: Output,
    *,
    elapsed: float = 0.0,
    scores: Mapping[str, bool] | None = None,
    notes: dict[str, Any] | None = None,
) -> Sample:
    trace = output.trace
    rounds = trace.rounds
    won = [len(r.branches[r.winner].lookaheads) for r in rounds]
    return Sample(
        setting=setting,
        problem=problem,
        correct=correct,
        text=output.text,
        tokens=output.tokens,
        tokens_paper=output.tokens_paper,
        rounds=output.rounds,
        seconds=output.seconds,
        first_round_seconds=output.first_round_seconds,
        finish=output.finish,
        by_round=tuple(
            w + sum(fill.kind != "edited" for fill in r.fills)
            for r, w in zip(rounds, won, strict=True)
        ),
        branches=tuple(len(r.branches) - 1 for r in rounds),
        forwarded=tuple(sum(b.end - r.start for b in r.branches) for r in rounds),
        elapsed=elapsed,
        scores=dict(scores or {}),
        prompt="".join(trace.pieces.get(i, "") for i in trace.prompt_ids),
        notes=notes,
    )


def figures(samples: Sequence[Sample]) -> dict[str, Any]:
    """Accuracy, parallelism and speed over all samples together.

    Speeds and latencies are an answer's own, its first round (the prefill) included unless the name
    says otherwise; `together` counts all answers that ran at once.
    """
    correct, problems = sum(s.correct for s in samples), len(samples)
    tokens, rounds = sum(s.tokens for s in samples), sum(s.rounds for s in samples)
    tokens_paper = sum(s.tokens_paper for s in samples)
    seconds = sum(s.seconds for s in samples)
    prefill = sum(s.first_round_seconds for s in samples)
    elapsed = sum(s.elapsed for s in samples)
    speeds = sorted((s.tokens / s.seconds for s in samples if s.seconds), reverse=True)
    latencies = sorted(s.seconds for s in samples)
    return {
        "problems": problems,
        "correct": correct,
        "accuracy": correct / problems,
        "interval": list(wilson(correct, problems)),
        "scores": {n: sum(s.scores[n] for s in samples) / problems for n in samples[0].scores},
        "tokens": tokens,
        "tokens_paper": tokens_paper,
        "rounds": rounds,
        "tpf": tokens / rounds,
        "tpf_paper": tokens_paper / (rounds + problems),
        "tokens_per_second": tokens / seconds if seconds else 0.0,
        "tokens_per_second_max": speeds[0] if speeds else 0.0,
        "tokens_per_second_top10": sum(speeds[:10]) / len(speeds[:10]) if speeds else 0.0,
        "tokens_per_second_after_first": tokens / (seconds - prefill) if seconds > prefill else 0.0,
        "tokens_per_second_paper": tokens_paper / (seconds - prefill) if seconds > prefill else 0.0,
        "tokens_per_second_together": tokens / elapsed if elapsed else 0.0,
        "latency_mean": seconds / problems,
        "latency_p50": median(latencies),
        "latency_p95": latencies[min(problems - 1, int(0.95 * problems))],
        "latency_after_first": (seconds - prefill) / problems,
        "first_round_seconds": prefill / problems,
        "branches": sum(map(sum, (s.branches for s in samples))) / rounds,
        "unfinished": sum(s.finish not in ("eos", "stop", "filled") for s in samples),
    }


def mean_by_round(samples: Sequence[Sample]) -> list[float]:
    """Tokens that the first, second, … round brought, over the samples that had one."""
    longest = max((len(s.by_round) for s in samples), default=0)
    found = []
    for index in range(longest):
        values = [s.by_round[index] for s in samples if len(s.by_round) > index]
        found.append(sum(values) / len(values))
    return found


class Samples:
    """The samples of a run, by setting and problem."""

    def __init__(self) -> None:
        self.samples: dict[tuple[str, int], Sample] = {}

    def add(self, samples: Sequence[Sample]) -> None:
        for sample in samples:
            self.samples[sample.setting, sample.problem] = sample

    def of(self, setting: str, problems: int) -> list[Sample]:
        """Those of the first `problems`, in order; a file may hold more than is asked for."""
        keys = ((setting, i) for i in range(problems))
        return [self.samples[key] for key in keys if key in self.samples]


class SampleFile(Samples):
    """Samples on file under the description of a run; another run's file is refused."""

    def __init__(self, path: Path, run: Mapping[str, Any]) -> None:
        super().__init__()
        self.path = path
        head = json.dumps({"run": run}, ensure_ascii=False, sort_keys=True)
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path} is not a file: choose another place")
        # As bytes: a stop may cut inside a character. What follows the last line break was cut.
        *whole, cut = path.read_bytes().split(b"\n") if path.exists() else [b""]
        own = head.encode()
        if whole[0] != own if whole else not own.startswith(cut):
            raise ConfigError(
                f"{path} holds another run: give the settings it was made with, or another place"
            )
        for number, line in enumerate(whole[1:], 2):
            try:
                super().add([Sample(**_tuples(json.loads(line)))])
            except (ValueError, TypeError, AttributeError, RecursionError) as error:
                raise LopaError(
                    f"{path}, line {number} is no sample ({error}): remove the line"
                ) from None
        if not whole:
            path.write_bytes(own + b"\n")
        elif cut:
            os.truncate(path, path.stat().st_size - len(cut))

    def add(self, samples: Sequence[Sample]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            for sample in samples:
                file.write(json.dumps(asdict(sample), ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        super().add(samples)


def described_in(path: Path) -> dict[str, Any]:
    """The run that a file of samples is of."""
    try:
        with path.open(encoding="utf-8") as file:
            run: dict[str, Any] = json.loads(file.readline())["run"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise LopaError(f"{path} is no file of samples ({error}): give another folder") from None
    return run


def _tuples(raw: dict[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in raw.items()}
