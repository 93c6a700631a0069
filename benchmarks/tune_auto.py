"""What the constants of `branches="auto"` are worth: its choices against the best fixed number.

    python benchmarks/tune_auto.py --cost FILE [--cost FILE …] [--try '{"PLAIN": 3.0}' …]
                                   [--seeds 3,4,5] [--limit 80] [--device cuda] [--workers 6]

Rounds are charged with what they cost on a device, as in `lopa study choice`, so nothing is timed.
The first line of each task is today's constants (lopa/decoding/budget.py); every `--try` replaces
some of them. A cell is auto's tokens a second over the best fixed number's, and branches a round.
The spread is that of the mean over problems, drawn again 2,000 times, at the same costs.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lopa import LLM
from lopa.config import AUTO_BRANCHES
from lopa.decoding import budget
from lopa.decoding.budget import RoundCost
from lopa.evaluation import evaluate, tasks
from lopa.studies.choice import read_costs
from lopa.studies.speed import interval

TOKENS = 160
USUAL = {name: value for name, value in vars(budget).items() if name.isupper()}


class Job(NamedTuple):
    task: str
    branches: int | str
    points: tuple[tuple[int, float], ...] = ((1, 1.0),)  # of the round's cost
    constants: str = "{}"  # JSON


class Decoded(NamedTuple):
    """Of one problem."""

    tokens: int
    forwarded: list[int]  # tokens, by round
    tried: int  # branches, in all rounds


_llm: LLM
_prompts: dict[str, list[str]]


def begin(device: str | None, seeds: list[int], limit: int) -> None:
    """In each process: the model and the problems."""
    global _llm, _prompts
    _llm = LLM("tiny", device=device)
    _prompts = {
        task: [p.prompt for seed in seeds for p in evaluate.problems(task, "eval", limit, seed)]
        for task in tasks.TASKS
    }


def decode(job: Job) -> list[Decoded]:
    constants = json.loads(job.constants)
    for name, value in USUAL.items():
        given = constants.get(name, value)
        nested = (tuple(x) if isinstance(x, list) else x for x in given) if _listed(given) else None
        setattr(budget, name, given if nested is None else tuple(nested))
    _llm._round_cost = RoundCost(job.points)
    config = _llm.decode_config(branches=job.branches, max_new_tokens=TOKENS)
    outputs = sorted(_llm.generate_together(_prompts[job.task], config, max_running=64))
    return [
        Decoded(
            output.tokens,
            [sum(b.end - r.start for b in r.branches) for r in output.trace.rounds],
            sum(len(r.branches) - 1 for r in output.trace.rounds),
        )
        for _, output in outputs
    ]


def _listed(value: Any) -> bool:
    return isinstance(value, list | tuple)


def compare(cost: RoundCost, fixed: Iterable[list[Decoded]], auto: list[Decoded]) -> str:
    tokens, seconds = (
        np.array([[of(one) for one in arm] for arm in (*fixed, auto)], float)
        for of in (lambda one: one.tokens, lambda one: sum(map(cost, one.forwarded)))
    )
    speed = tokens.sum(axis=1) / seconds.sum(axis=1)
    best = int(speed[:-1].argmax())
    low, high = interval(tokens[[best, -1]], seconds[[best, -1]], 0)
    tried = sum(one.tried for one in auto) / sum(len(one.forwarded) for one in auto)
    ratio = speed[-1] / speed[best]
    return f"{ratio:.3f} ({low:.3f} … {high:.3f}) of k = {AUTO_BRANCHES[best]}, {tried:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cost", type=Path, action="append", required=True)
    parser.add_argument("--try", dest="trials", action="append", default=[])
    parser.add_argument("--seeds", default="3,4,5")
    parser.add_argument("--limit", type=int, default=80, help="problems of each seed")
    parser.add_argument("--device")
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    costs = {
        name: tuple((int(t), s) for t, s in points)
        for name, points in read_costs(options.cost).items()
    }
    trials = ["{}", *options.trials]
    unknown = {name for trial in trials for name in json.loads(trial)} - {*USUAL}
    if unknown:
        parser.error(f"no constant {', '.join(sorted(unknown))}: there are {', '.join(USUAL)}")
    jobs = [Job(task, k) for task in tasks.TASKS for k in AUTO_BRANCHES]
    jobs += [
        Job(task, "auto", points, trial)
        for trial in trials
        for task in tasks.TASKS
        for points in costs.values()
    ]
    seeds = [int(seed) for seed in options.seeds.split(",")]
    with ProcessPoolExecutor(
        options.workers,
        multiprocessing.get_context("spawn"),
        begin,
        (options.device, seeds, options.limit),
    ) as pool:
        found = {}
        for job, decoded in zip(jobs, pool.map(decode, jobs), strict=True):
            found[job] = decoded
            print(f"\r{len(found)} of {len(jobs)}", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
    for task in tasks.TASKS:
        fixed = [found[Job(task, k)] for k in AUTO_BRANCHES]
        for trial in trials:
            print(f"{task}, {'as it is' if trial == '{}' else trial}")
            for name, points in costs.items():
                said = compare(RoundCost(points), fixed, found[Job(task, "auto", points, trial)])
                print(f"    {name}: {said}")


if __name__ == "__main__":
    main()
