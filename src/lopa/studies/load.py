"""Speed by requests at once: `auto`, which shares a round's rows, against every fixed number.

So many answers are asked for at a time, of which the engine runs as many as it does by default.
Timed on this machine, some problems at a time, three times over. The settings take turns of a
moment, the one that has decoded the fewest tokens next, so that a disturbance meets all of them.
What counts is the median of a setting's speed over the mean speed of its problems. Each has one
engine for all its turns, as a server has. Or, with costs of rounds given, simulated: the model
decodes, and a round takes what it costs on the given device.
"""

from __future__ import annotations

import gc
import random
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import log
from statistics import median
from typing import Any

import numpy as np

from lopa.bench import gc_frozen
from lopa.config import AUTO_BRANCHES, DecodeConfig
from lopa.decoding.round_cost import RoundCost
from lopa.engine.base import MAX_RUNNING, TOKEN_BUDGET
from lopa.engine.llm import LLM
from lopa.engine.output import Event
from lopa.engine.scheduler import Scheduler
from lopa.engine.session import Session
from lopa.evaluation import plots
from lopa.evaluation.sample import Sample, make_sample
from lopa.evaluation.scoring import score
from lopa.studies.speed import RESAMPLES
from lopa.studies.study import Findings, Setting, Study, Table
from lopa.types import FloatArray

AT_ONCE = (1, 2, 4, 8, 16, 32, 64, 128)
SETTINGS = (*map(str, AUTO_BRANCHES), "auto")
RUNS = 3  # of each setting, when it is timed
LEAST_TOGETHER = 16  # problems that are timed with a setting in one go
QUEUED = 4  # at least so many for each that the engine runs: few of them are decoded alone
TURN = 0.03  # seconds of a setting, then it is the next one's turn; a round that is longer is one
# Every load and run finds the same answers again, and to run one of `functions` takes 20 ms.
_score = lru_cache(maxsize=1 << 16)(score)


def run(study: Study) -> Findings:
    loads = study.at_once or AT_ONCE
    if study.costs:
        costs = {name: RoundCost.of(cost) for name, cost in study.costs.items()}
        each = [_simulate(study, name, cost, n) for name, cost in costs.items() for n in loads]
        return {"loads": [found for found in each if found is not None]}
    cost = study.model.round_cost  # measured before anything is timed
    if study.model.runner.is_async:  # nor are graphs captured meanwhile
        study.model.capture_graphs(TOKEN_BUDGET)
    found: dict[tuple[int, str], list[list[Sample]]] = {}
    engines: dict[tuple[int, str], Scheduler] = {}  # by load and setting
    count = len(study.problems)
    total = RUNS * len(loads) * count
    for at, (n, number) in enumerate([(n, number) for n in loads for number in range(RUNS)]):

        def say(done: int, before: int = at * count) -> None:
            study.progress(before + done, total)

        say(0)
        for setting, samples in _timed(study, n, number, engines, say).items():
            found.setdefault((n, setting), []).append(samples)
    compared = []
    for n in loads:
        runs = {setting: found[n, setting] for setting in SETTINGS}
        figures = {s: _figures([sample for run in runs[s] for sample in run]) for s in SETTINGS}
        for setting, speed in speeds(runs, _together(n)).items():
            figures[setting]["tokens_per_second"] = speed
        one = _compare("", n, figures)
        one["interval"] = interval(runs, _together(n), "auto", one["best"])
        compared.append(one)
    return {"round_cost": cost.settings(), "loads": compared}


def _config(study: Study, setting: str) -> DecodeConfig:
    return study.config(branches="auto" if setting == "auto" else int(setting))


def _timed(
    study: Study,
    at_once: int,
    number: int,
    engines: dict[tuple[int, str], Scheduler],
    say: Callable[[int], None],  # how many problems are done
) -> dict[str, list[Sample]]:
    """A run of every setting, from the file, or decoded and timed.

    Some problems at a time, each setting in turn: the speed of a shared machine drifts, and then
    all of them meet it. A run that was interrupted is done again.
    """
    keys = {s: f"{at_once} at once, k = {s}, run {number + 1}" for s in SETTINGS}
    count = len(study.problems)
    found = {setting: study.file.of(key, count) for setting, key in keys.items()}
    missing = [setting for setting, samples in found.items() if len(samples) < count]
    if not missing:
        say(count)
        return found
    found |= {setting: [] for setting in missing}
    llm, prompts = study.model, [problem.prompt for problem in study.problems]
    ways = {}
    for setting in missing:
        config, engine = _config(study, setting), engines.get((at_once, setting))
        if engine is None:
            engine = engines[at_once, setting] = _engine(llm, at_once)
        ways[setting] = engine, config
    size = _together(at_once)
    for first in range(0, count, size):
        turn = list(ways.items())
        random.Random(f"{at_once} {number} {first}").shuffle(turn)
        some = prompts[first : first + size]
        runs = {setting: Run(llm, *way, some) for setting, way in turn}
        take_turns(runs)
        for setting, run in runs.items():
            found[setting] += [replace(s, problem=s.problem + first) for s in run.samples]
        say(min(first + size, count))
    return {
        setting: _keep(study, keys[setting], samples) if setting in missing else samples
        for setting, samples in found.items()
    }


def _engine(llm: LLM, at_once: int) -> Scheduler:
    return llm.engine(max_running=min(at_once, MAX_RUNNING))


def _together(at_once: int) -> int:
    """Problems of a group, which is timed with every setting before the next."""
    return max(LEAST_TOGETHER, QUEUED * min(at_once, MAX_RUNNING))


def _keep(study: Study, key: str, samples: list[Sample]) -> list[Sample]:
    scored = [
        replace(s, setting=key, correct=_score(study.problems[s.problem], s.text)) for s in samples
    ]
    study.file.add(scored)
    return scored


class Run:
    """Answers to some prompts with one setting.

    A sample has the seconds since the one before it was ready, by the time that its rounds took.
    """

    def __init__(
        self,
        llm: LLM,
        engine: Scheduler,  # that has nothing to do
        config: DecodeConfig,
        prompts: Sequence[str],
        cost: RoundCost | None = None,  # of a round, in place of the clock
    ) -> None:
        self.cost = cost
        self.engine = engine
        self.samples: list[Sample] = []
        self.clock = 0.0  # seconds of the rounds so far
        self.tokens = 0  # that they have brought
        self._last = 0.0  # when a sample was ready
        self._numbers: dict[Session, int] = {}
        for number, prompt in enumerate(prompts):
            session = llm.session(prompt, config, cost=cost)
            self._numbers[session] = number
            self.engine.add(session)

    def take_turn(self) -> None:
        """TURN seconds, at the end of which no round is in flight: the next one's would wait."""
        engine, until = self.engine, self.clock + TURN
        goes_on = engine.overlap
        while engine.busy and (self.clock < until or engine.in_flight):
            engine.overlap = goes_on and self.clock < until
            self.step()
        engine.overlap = goes_on

    def step(self) -> list[tuple[Session, Event]]:
        before, began = self.clock, time.perf_counter()
        events = self.engine.step()
        if self.cost is None:
            self.clock = before + time.perf_counter() - began
        else:
            self.clock = before + predicted_seconds(self.cost, events)
        for session, event in events:
            self.tokens += session.decoder.brought
            if event.output is not None:
                elapsed, self._last = self.clock - self._last, self.clock
                number = self._numbers.pop(session)  # a server forgets what has ended, too
                self.samples.append(make_sample("", number, False, event.output, elapsed=elapsed))
        if self.cost is None:  # a round in flight goes on while samples are made
            self.clock = before + time.perf_counter() - began
        return events


def take_turns(runs: Mapping[str, Run]) -> None:
    """Every run to its end. Garbage is collected between turns: it is that of all runs."""
    with gc_frozen.frozen():
        gc.disable()
        try:
            while busy := [run for run in runs.values() if run.engine.busy]:
                min(busy, key=lambda run: run.tokens).take_turn()
                gc.collect(1)  # what has been there for long is left alone
        finally:
            gc.enable()


def _finish(run: Run) -> list[Sample]:
    while run.engine.busy:
        run.step()
    return run.samples


def simulate(
    llm: LLM, prompts: Sequence[str], config: DecodeConfig, at_once: int, cost: RoundCost
) -> list[Sample]:
    """The answers as they would be ready if rounds took what they cost."""
    engine = _engine(llm, at_once)
    engine.overlap = False  # a simulated round is of all sessions
    return _finish(Run(llm, engine, config, prompts, cost))


def predicted_seconds(cost: RoundCost, events: list[tuple[Session, Event]]) -> float:
    """Of a round of all these sessions, by what it forwarded."""
    rounds = [event.round for _, event in events]
    tokens = sum(branch.end - one.start for one in rounds for branch in one.branches)
    return cost(tokens, [len(one.branches) - 1 for one in rounds])


# -- simulated -------------------------------------------------------------------------------------


def _simulate(study: Study, name: str, cost: RoundCost, at_once: int) -> Findings | None:
    """Fixed numbers are decoded once and replayed: their rounds do not depend on the load.

    None: there is nothing to report.
    """
    key = f"{at_once} at once, auto, {name}"
    samples = study.file.of(key, len(study.problems))
    if study.llm is None and len(samples) < len(study.problems):
        return None
    fixed = [Setting(f"k = {k}", {"branches": k}) for k in AUTO_BRANCHES]
    decoded = study.decode(fixed)
    found = {
        str(k): _figures(replay(decoded[setting.name], cost, at_once))
        for k, setting in zip(AUTO_BRANCHES, fixed, strict=True)
    }
    if len(samples) < len(study.problems):
        prompts = [problem.prompt for problem in study.problems]
        samples = simulate(study.model, prompts, _config(study, "auto"), at_once, cost)
        samples = _keep(study, key, samples)
    return _compare(name, at_once, {**found, "auto": _figures(samples)})


def replay(samples: Sequence[Sample], cost: RoundCost, at_once: int) -> list[Sample]:
    """The same answers as they would be ready if rounds took what they cost, so many at once."""
    samples = sorted(samples, key=lambda sample: sample.problem)
    ready, last = [], 0.0
    for number, clock in ready_times(samples, [0.0] * len(samples), cost, at_once):
        ready.append(replace(samples[number], elapsed=clock - last))
        last = clock
    return ready


def ready_times(
    samples: Sequence[Sample], due: Sequence[float], cost: RoundCost, at_once: int = MAX_RUNNING
) -> list[tuple[int, float]]:
    """Which answer is ready when, the first one first, if rounds took what they cost.

    due: seconds at which they are asked for.
    """
    coming = in_order(due)
    waiting: deque[int] = deque()
    running: deque[tuple[int, int]] = deque()  # and how many rounds it has had
    ready = []
    clock = 0.0
    while coming or waiting or running:
        if not waiting and not running:
            clock = max(clock, coming[0][1])
        while coming and coming[0][1] <= clock:
            waiting.append(coming.popleft()[0])
        free = min(at_once, MAX_RUNNING) - len(running)
        new = [(waiting.popleft(), 0) for _ in range(min(free, len(waiting)))]
        running.extendleft(reversed(new))  # as the scheduler does
        tokens = 0
        branches: list[int] = []  # of the sessions whose turn it is
        for number, rounds in running:
            sample = samples[number]
            if branches and tokens + sample.forwarded[rounds] > TOKEN_BUDGET:
                break
            tokens += sample.forwarded[rounds]
            branches.append(sample.branches[rounds])
        clock += cost(tokens, branches)
        for _ in branches:
            number, rounds = running.popleft()
            if rounds + 1 < samples[number].rounds:
                running.append((number, rounds + 1))
            else:
                ready.append((number, clock))
    return ready


def in_order(due: Sequence[float]) -> deque[tuple[int, float]]:
    """Requests and when they are due, the first one first."""
    return deque(sorted(enumerate(due), key=lambda each: each[1]))


def _figures(samples: Sequence[Sample]) -> Findings:
    tokens, rounds = sum(s.tokens for s in samples), sum(s.rounds for s in samples)
    return {
        "tokens_per_second": tokens / sum(s.elapsed for s in samples),
        "tpf": tokens / rounds,
        "branches": sum(map(sum, (s.branches for s in samples))) / rounds,
        "latency": median(s.seconds for s in samples),
        "accuracy": sum(s.correct for s in samples) / len(samples),
    }


def speeds(runs: Mapping[str, Sequence[Sequence[Sample]]], together: int) -> dict[str, float]:
    """Tokens per second by setting. runs: of each setting, as many.

    A group is the same problems with every setting. The mean speed of a group is that of the
    machine at the time: what counts of a setting is the median over groups of its speed over that.
    The mean over groups makes tokens per second of it. Means are geometric.
    """
    groups = _by_group(runs, together)
    found = np.exp(groups.mean() + np.median(_relative(groups), axis=0)).tolist()
    return dict(zip(runs, found, strict=True))


def interval(
    runs: Mapping[str, Sequence[Sequence[Sample]]], together: int, setting: str, other: str
) -> list[float]:
    """95 % of one setting's speed over another's, over resampled groups."""
    relative = _relative(_by_group(runs, together))
    count = len(relative)
    resampled = np.random.default_rng(0).integers(count, size=(RESAMPLES, count))
    medians = np.median(relative[resampled], axis=1)
    names = list(runs)
    ratios = np.exp(medians[:, names.index(setting)] - medians[:, names.index(other)])
    found: list[float] = np.quantile(ratios, (0.025, 0.975)).tolist()
    return found


def _by_group(runs: Mapping[str, Sequence[Sequence[Sample]]], together: int) -> FloatArray:
    """[groups, settings] log of tokens per second."""
    groups = []
    for each in zip(*runs.values(), strict=True):
        for part in sorted({sample.problem // together for sample in each[0]}):
            some = [[s for s in run if s.problem // together == part] for run in each]
            groups.append([log(sum(s.tokens for s in x) / sum(s.elapsed for s in x)) for x in some])
    return np.array(groups)


def _relative(groups: FloatArray) -> FloatArray:
    found: FloatArray = groups - groups.mean(axis=1, keepdims=True)
    return found


def _compare(name: str, at_once: int, settings: dict[str, Findings]) -> Findings:
    speeds = {b: f["tokens_per_second"] for b, f in settings.items()}
    fixed = {b: speed for b, speed in speeds.items() if b != "auto"}
    best = max(fixed, key=fixed.__getitem__)
    return {
        "cost": name,
        "at_once": at_once,
        "best": best,
        "ratio": speeds["auto"] / speeds[best],
        "over_d2f": speeds["auto"] / speeds["0"],
        "settings": settings,
    }


def table(findings: Findings) -> Table:
    fixed = ["D2F", *(f"k = {k}" for k in AUTO_BRANCHES[1:])]
    heads = ("at once", *fixed, "auto", "its branches", "auto / best fixed", "auto / D2F")
    rows = []
    for found in findings["loads"]:
        speeds = [f"{found['settings'][b]['tokens_per_second']:.0f}" for b in SETTINGS]
        where = f"{found['at_once']}" + (f", {found['cost']}" if found["cost"] else "")
        tried = found["settings"]["auto"]["branches"]
        ratio = f"{found['ratio']:.3f}"
        if "interval" in found:
            low, high = found["interval"]
            ratio += f" ({low:.3f} … {high:.3f})"
        rows.append((where, *speeds, f"{tried:.1f}", ratio, f"{found['over_d2f']:.2f}"))
    return heads, rows


def reading(findings: Findings) -> str:
    loads = findings["loads"]
    if not loads:
        return "Not measured."
    worst = min(loads, key=lambda found: found["ratio"])
    least = min(found["over_d2f"] for found in loads)
    timed = " In brackets: 95 % intervals, over resampled groups of problems."
    return (
        "Cells are tokens per second of all answers together. `auto` makes at least "
        f"{worst['ratio']:.3f} times the best fixed number's (with {worst['at_once']} at once), "
        f"and at least {least:.2f} times D2F's."
    ) + (timed if "interval" in loads[0] else "")


def plot(findings: Findings) -> Any:
    names = list(dict.fromkeys(found["cost"] for found in findings["loads"]))
    figure, parts = plots.require_plots().subplots(
        1, max(1, len(names)), figsize=(6.5 * max(1, len(names)), 4), squeeze=False
    )
    for part, name in zip(parts[0], names, strict=False):
        loads = [found for found in findings["loads"] if found["cost"] == name]
        at_once = [found["at_once"] for found in loads]
        for branches in SETTINGS:
            speeds = [found["settings"][branches]["tokens_per_second"] for found in loads]
            label = {"auto": "auto", "0": "D2F"}.get(branches, f"k = {branches}")
            width = 2.5 if branches == "auto" else 1.2
            part.plot(at_once, speeds, "o-", label=label, linewidth=width, markersize=4)
        part.set_xscale("log", base=2)
        part.set_xticks(at_once, [str(n) for n in at_once])
        part.set_xlabel("requests at once")
        part.set_ylabel("tokens per second, all together")
        part.set_ylim(bottom=0)
        part.set_title(name, fontsize=9)
        part.grid(alpha=0.3)
        part.legend(fontsize=8)
    return figure
