"""Benchmarks as they are run: exercises, and how they want to be asked and scored.

The built-in tasks and the public benchmarks end here in the same nouns, so there is one way to
decode, score, resume and report them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from lopa.engine.llm import LLM
    from lopa.engine.prompts import Infill, Text

Scores: TypeAlias = Mapping[str, bool]  # by name; the first is the one that counts


@dataclass(frozen=True, slots=True)
class Exercise:
    """One prompt, and what decides whether an answer to it is right."""

    prompt: Text  # or chat messages
    score: Callable[[str], Scores]  # never raises for any text
    opening: str = ""  # how the answer is made to begin: the prompt's last words
    suffix: str = ""  # infilling: the text behind the gap, whose text is the answer
    hidden: str | None = None  # the gap is as long as this text; None: its length is searched

    def encode(self, llm: LLM, bos: str) -> list[int] | Infill:
        """The prompt's ids; `bos` in front where the model has such a token."""
        first = llm.tokenizer.token_id(bos) if bos and llm.tokenizer else None
        opening = llm.encode(self.opening) if self.opening else []
        ids = [*([] if first is None else [first]), *llm.encode(self.prompt), *opening]
        if not self.suffix:
            return ids
        length = None if self.hidden is None else len(llm.encode(self.hidden))
        from lopa.engine.prompts import Infill

        return Infill(ids, ((length, self.suffix),))


@dataclass(frozen=True, slots=True)
class Benchmark:
    name: str
    exercises: Sequence[Exercise]
    title: str  # what a person is told above the figures
    facts: Mapping[str, Any] = field(default_factory=dict)  # what figures must be read with
    room: int | None = None  # new tokens that an answer may need
    stop: tuple[str, ...] = ()
    bos: str = ""

    def described(self) -> dict[str, Any]:
        """What a run is of: two that say the same ask the same."""
        asked = hashlib.blake2b(digest_size=8)
        for exercise in self.exercises:
            asked.update(repr((exercise.prompt, exercise.opening)).encode())
            if exercise.suffix:
                asked.update(repr((exercise.suffix, exercise.hidden)).encode())
        count = {"problems": len(self.exercises), "asked": asked.hexdigest()}
        return {"task": self.name, **self.facts, **count}

    def options(self, given: Mapping[str, Any], preset: str | None) -> dict[str, Any]:
        """Decoding options: those given, and the benchmark's own where none are."""
        own: dict[str, Any] = {"stop": self.stop} if self.stop else {}
        if self.room is not None and preset is None:
            own["max_new_tokens"] = self.room
        return {**own, **given}
