"""What the studies share: problems, settings, and answers, decoded once and kept on file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from lopa.config import DecodeConfig
from lopa.decoding.policy import LookaheadPolicy
from lopa.decoding.round_cost import RoundCost
from lopa.engine.llm import LLM
from lopa.engine.session import Session
from lopa.errors import ConfigError
from lopa.evaluation.sample import Sample, SampleFile, make_sample
from lopa.evaluation.scoring import score
from lopa.evaluation.sweep import setting_name
from lopa.studies.policies import POLICIES
from lopa.tasks.problem import Problem

Findings: TypeAlias = dict[str, Any]  # what goes to JSON
Table: TypeAlias = tuple[Sequence[str], Sequence[Sequence[str]]]  # heads, rows

_SCORERS = 4  # answers scored at once: each may run code in a process of its own


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to decode all the problems."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)  # on top of the study's own
    policy: str | None = None  # of lookahead, in place of the configured one
    seed: int = 0  # of its chance
    cost: tuple[str, RoundCost] | None = None  # of a round, and whose it is

    def make_policy(self, config: DecodeConfig) -> LookaheadPolicy | None:
        return None if self.policy is None else POLICIES[self.policy](config, self.seed)


@dataclass(frozen=True, slots=True)
class Job:
    """A setting and the problems that are to be decoded under it; may go to another process."""

    key: str  # of its samples on file
    setting: Setting
    config: DecodeConfig
    prompts: Sequence[tuple[int, str]]
    batch_size: int  # answers decoded at once

    def run(self, llm: LLM) -> Iterator[Sample]:
        """In order of completion, not scored yet."""
        numbers: dict[Session, int] = {}
        cost = self.setting.cost[1] if self.setting.cost else None

        def begin() -> Iterator[Session]:
            for number, prompt in self.prompts:
                policy = self.setting.make_policy(self.config)
                session = llm.session(prompt, self.config, cost=cost, policy=policy)
                numbers[session] = number
                yield session

        for session in llm.engine(max_running=self.batch_size).run(begin()):
            assert session.output is not None
            notes = getattr(session.decoder.policy, "notes", None)
            number = numbers.pop(session)
            yield make_sample(self.key, number, False, session.output, notes=notes)


DecodeJobs: TypeAlias = Callable[[Sequence[Job]], Iterable[Sequence[Sample]]]


@dataclass(frozen=True, slots=True)
class Study:
    """A model, problems and the settings that a study varies."""

    llm: LLM | None  # None: report what is on file, and leave out what is not
    problems: Sequence[Problem]
    options: Mapping[str, Any]  # of DecodeConfig, all of them
    seed: int
    file: SampleFile
    batch_size: int = 1  # answers decoded at once
    workers: DecodeJobs | None = None  # processes that decode; None: this one
    progress: Callable[[int, int], None] = lambda done, total: None
    costs: Mapping[str, Any] = field(default_factory=dict)  # of a round, by device
    at_once: Sequence[int] = ()  # requests, for the study load; empty: as it likes

    def config(self, **changes: Any) -> DecodeConfig:
        return DecodeConfig(**self.options).changed(**changes)

    @property
    def model(self) -> LLM:
        if self.llm is None:
            raise ConfigError("this study is timed: it cannot be reported from a file")
        return self.llm

    def decode(self, settings: Sequence[Setting]) -> dict[str, list[Sample]]:
        """Every problem under every setting, scored; what is on file is not decoded again."""
        if self.llm is None:
            return {s.name: self._samples(s) for s in settings if not self._job(s).prompts}
        jobs = list({self._key(setting): self._job(setting) for setting in settings}.values())
        total = len(jobs) * len(self.problems)
        done = total - sum(len(job.prompts) for job in jobs)
        jobs = [job for job in jobs if job.prompts]
        decode = self.workers or self._in_process
        known = {(s.problem, s.text): s.correct for s in self.file.samples.values()}

        def scored(sample: Sample) -> Sample:
            key = sample.problem, sample.text
            if key not in known:  # two threads may find the same: no harm
                known[key] = score(self.problems[sample.problem], sample.text)
            return replace(sample, correct=known[key])

        with ThreadPoolExecutor(_SCORERS) as pool:
            for samples in decode(jobs) if jobs else ():
                self.file.add(list(pool.map(scored, samples)))
                done += len(samples)
                self.progress(done, total)
        return {setting.name: self._samples(setting) for setting in settings}

    def _samples(self, setting: Setting) -> list[Sample]:
        return self.file.of(self._key(setting), len(self.problems))

    def _key(self, setting: Setting) -> str:
        """Under what its samples are on file: what it changes. Studies share what they share."""
        usual, own = self.config().settings(), self.config(**setting.options).settings()
        changed = {name: value for name, value in own.items() if value != usual.get(name)}
        chance = {setting.policy: setting.seed} if setting.policy else {}
        cost = {"cost": setting.cost[0]} if setting.cost else {}
        return setting_name(changed | chance | cost) or "as given"

    def _job(self, setting: Setting) -> Job:
        key = self._key(setting)
        missing = [
            (i, problem.prompt)
            for i, problem in enumerate(self.problems)
            if (key, i) not in self.file.samples
        ]
        return Job(key, setting, self.config(**setting.options), missing, self.batch_size)

    def _in_process(self, jobs: Sequence[Job]) -> Iterator[list[Sample]]:
        return ([sample] for job in jobs for sample in job.run(self.model))
