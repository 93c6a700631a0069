"""A server from idle to overload and back, simulated: auto and fixed numbers of branches.

    python measurements/simulated_ramp.py --task words --cost FILE … [--shares 0.1,0.4,0.8,1.1]
        [--requests 120] [--runs 4] [--seed 7] [--limit 64] [--samples FILE] [--json FILE]

The model decodes, and a round takes what it costs on the given device (`lopa bench cost`). Rates
are shares of what the best fixed number completes with all places taken; requests are those of the
highest rate. Arrivals, percentiles and the comparison with the best fixed number are those of `lopa
bench serve --ramp`. What a server adds to a round is left out. --samples keeps what fixed numbers
decode: their rounds are the same at every rate.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import ramp_report
from lopa import LLM, DecodeConfig
from lopa.atomic_write import write_lines
from lopa.bench.serve_load import Answer, Offered, arrivals, over_envelope, summarise
from lopa.cli.environment import environment
from lopa.cli.progress import Progress
from lopa.config import AUTO_BRANCHES
from lopa.decoding.round_cost import RoundCost
from lopa.engine.base import MAX_RUNNING
from lopa.evaluation import evaluate
from lopa.evaluation.sample import Sample, SampleFile
from lopa.studies import load, recorded_cost
from lopa.studies.study import Setting, Study

ROOM = 160  # new tokens
Due = Sequence[float]  # seconds at which requests arrive


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", required=True)
    parser.add_argument("--cost", type=Path, action="append", required=True)
    parser.add_argument("--shares", default="0.1,0.4,0.8,1.1")
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--runs", type=int, default=4)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--limit", type=int, default=64)
    parser.add_argument("--samples", type=Path)
    parser.add_argument("--json", type=Path, metavar="FILE", help="the figures, of one cost")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    options = parser.parse_args()
    costs = recorded_cost.read_costs(options.cost)
    if options.json is not None and len(costs) > 1:
        parser.error("--json takes one --cost")
    llm = LLM("tiny", device=options.device, dtype=options.dtype)
    problems = evaluate.problems(options.task, "eval", options.limit, options.seed)
    prompts = [problem.prompt for problem in problems]
    settings = llm.decode_config(max_new_tokens=ROOM).settings()
    fixed = [Setting(str(k), {"branches": k}) for k in AUTO_BRANCHES]
    with tempfile.TemporaryDirectory() as folder:
        told = {
            **{name: getattr(options, name) for name in ("task", "seed", "limit")},
            "settings": settings,
            "host": environment(llm),
        }
        file = SampleFile(options.samples or Path(folder) / "samples.jsonl", told)
        study = Study(llm, problems, settings, options.seed, file, 16)
        decoded = study.decode(fixed)
        auto = study.config(branches="auto")
    shares = [float(share) for share in options.shares.split(",")]
    shares += shares[-2::-1]
    for name, given in costs.items():
        cost = RoundCost.of(given)
        highest = max(capacity(samples, cost) for samples in decoded.values())
        rates = [share * highest for share in shares]
        seconds = options.requests / max(rates)
        found: dict[str, list[list[Offered]]] = {setting: [] for setting in (*decoded, "auto")}
        with Progress(f"{name}: auto", "runs") as progress:
            for run in range(options.runs):
                progress.update(run, options.runs)
                due = [
                    [step * seconds + at for at in arrivals(rate, seconds, seed)]
                    for step, rate in enumerate(rates)
                    for seed in [options.seed + run * len(rates) + step]
                ]
                together = [at for each in due for at in each]
                for setting, samples in decoded.items():
                    found[setting].append(offered(replayed(samples, together, cost), due, rates))
                answers = simulated(llm, prompts, auto, together, cost)
                found["auto"].append(offered(answers, due, rates))
        asked = {
            key: getattr(options, key) for key in ("task", "limit", "runs", "requests", "seed")
        }
        report({**asked, "cost": name}, found, options.json)


def capacity(samples: Sequence[Sample], cost: RoundCost) -> float:
    """Requests per second, with all places taken."""
    several = [
        replace(sample, problem=turn * len(samples) + sample.problem)
        for turn in range(-(-8 * MAX_RUNNING // len(samples)))
        for sample in samples
    ]
    return len(several) / sum(s.elapsed for s in load.replay(several, cost, MAX_RUNNING))


def replayed(samples: Sequence[Sample], due: Due, cost: RoundCost) -> list[Answer]:
    """As `simulated` answers, of samples whose rounds do not depend on what runs beside them."""
    samples = sorted(samples, key=lambda sample: sample.problem)
    asked = [samples[number % len(samples)] for number in range(len(due))]
    answers = [Answer() for _ in due]
    for number, clock in load.ready_times(asked, due, cost):
        sample = asked[number]
        mean = sum(sample.branches) / sample.rounds
        answers[number] = _answer(clock - due[number], sample.tokens, mean)
    return answers


def simulated(
    llm: LLM, prompts: Sequence[str], config: DecodeConfig, due: Due, cost: RoundCost
) -> list[Answer]:
    """What requests would be answered that arrive while the engine runs."""
    engine = llm.engine()
    engine.overlap = False  # a simulated round is of all sessions
    coming = load.in_order(due)
    numbers = {}
    answers = [Answer() for _ in due]
    clock = 0.0
    while coming or engine.busy:
        if not engine.busy:
            clock = max(clock, coming[0][1])
        while coming and coming[0][1] <= clock:
            number, _ = coming.popleft()
            session = llm.session(prompts[number % len(prompts)], config, cost=cost)
            numbers[session] = number
            engine.add(session)
        events = engine.step()
        clock += load.predicted_seconds(cost, events)
        for session, event in events:
            if (output := event.output) is not None:
                number = numbers.pop(session)
                seconds = clock - due[number]
                answers[number] = _answer(seconds, output.tokens, output.mean_branches)
    return answers


def _answer(seconds: float, tokens: int, branches: float) -> Answer:
    return Answer(status=200, seconds=seconds, tokens=tokens, branches=branches)


def offered(answers: Sequence[Answer], due: Sequence[Due], rates: Sequence[float]) -> list[Offered]:
    """By rate."""
    found = []
    for rate, times in zip(rates, due, strict=True):
        each, answers = list(answers[: len(times)]), answers[len(times) :]
        seconds = max(at + answer.seconds for at, answer in zip(times, each, strict=True))
        found.append(Offered(rate, each, seconds - times[0]))
    return found


def report(
    asked: dict[str, Any], found: dict[str, list[list[Offered]]], record: Path | None
) -> None:
    """Print it; the record is of the form that `lopa bench serve --json` has."""
    loads = [
        {"asked": setting, **asdict(summarise(same))}
        for setting, runs in found.items()
        for same in zip(*runs, strict=True)
    ]
    ratios = [ratio and asdict(ratio) for ratio in over_envelope(found)]
    said = {**asked, "auto_over_envelope": ratios, "loads": loads}
    print(asked["cost"], ramp_report.ramp(said), sep="\n\n", flush=True)
    if record is not None:
        write_lines(record, [json.dumps(said)])


if __name__ == "__main__":
    main()
