"""What the studies share: the problems, and decoding them with a decoder of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from lopa.config import DecodeConfig
from lopa.decoding.decoder import Decoder
from lopa.engine.llm import LLM
from lopa.engine.session import Session
from lopa.evaluation import tasks
from lopa.evaluation.problem import Problem
from lopa.evaluation.sample import Sample, make_sample

Findings: TypeAlias = dict[str, Any]  # what goes to JSON
Table: TypeAlias = tuple[Sequence[str], Sequence[Sequence[str]]]  # heads, rows
MakeDecoder: TypeAlias = Callable[..., Decoder]


@dataclass(frozen=True, slots=True)
class Study:
    """A model, problems and the settings that a study varies."""

    llm: LLM
    problems: Sequence[Problem]
    options: Mapping[str, Any]  # of DecodeConfig
    seed: int
    tick: Callable[[], None] = lambda: None  # called after every answer

    def config(self, **changes: Any) -> DecodeConfig:
        return self.llm.decode_config(**{**self.options, **changes})

    def decode(
        self, setting: str, config: DecodeConfig, make: MakeDecoder | None = None
    ) -> list[Sample]:
        """Every problem once, scored; `make` puts another decoder in the place of the usual."""
        return [self.answer(setting, i, config, make) for i in range(len(self.problems))]

    def answer(
        self, setting: str, index: int, config: DecodeConfig, make: MakeDecoder | None = None
    ) -> Sample:
        problem = self.problems[index]
        session = self.llm.session(problem.prompt, config)
        if make is not None:
            usual, ids = session.decoder, session.trace.prompt_ids
            given = {"mask_id": usual.mask_id, "eos_ids": usual.eos_ids, "shift": usual.shift}
            decoder = make(config, ids, aligned=usual.aligned, **given)
            session = Session(self.llm.runner, self.llm.tokenizer, decoder, ids)
        try:
            while session.step() is not None:
                pass
        finally:
            session.close()
        assert session.output is not None
        correct = tasks.score(problem, session.output.text)
        self.tick()
        return make_sample(setting, index, correct, session.output)
