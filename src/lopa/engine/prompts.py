"""Prompts as callers give them: text, chat messages or token ids, one or a list of those.

With gaps: `Infill`, whose text is encoded piece by piece.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from lopa.config import DecodeConfig
from lopa.decoding.length_search import MOST_LENGTHS, lengths_to_try
from lopa.errors import PromptError
from lopa.models import questions
from lopa.models.config import ModelConfig
from lopa.models.tokenizer import Tokenizer
from lopa.types import Gap

Messages: TypeAlias = Sequence[Mapping[str, str]]
Text: TypeAlias = str | Messages | Sequence[int]
GapTokens: TypeAlias = int | Sequence[int] | None


@dataclass(frozen=True, slots=True)
class Infill:
    """A prompt with gaps: text, then a gap and the text behind it, once or more.

    Text that is pinned behind a gap is a string, or token ids as they are.
    """

    prefix: Text
    # Of each gap: its tokens, or those to choose from, or None: any number; and what is behind it.
    gaps: tuple[tuple[GapTokens, str | Sequence[int]], ...]

    @classmethod
    def of(cls, pieces: Sequence[Any]) -> Infill:
        """pieces: text, a gap as its number of tokens, text, and so on."""
        given = list(pieces) if isinstance(pieces, list | tuple) else []
        if len(given) < 3 or len(given) % 2 == 0:
            raise PromptError("pieces are text, a gap as its number of tokens, text, and so on")
        prefix, *rest = given
        return cls(prefix, tuple(zip(rest[::2], rest[1::2], strict=True)))


Prompt: TypeAlias = Text | Infill
Batch: TypeAlias = (
    list[str] | Sequence[Messages] | Sequence[Sequence[int]] | list[Infill] | list[Prompt]
)


def not_a_prompt(given: object) -> PromptError:
    return PromptError(
        "a prompt is text, a list of chat messages or a list of token ids: "
        f"got {type(given).__name__}"
    )


def is_batch(prompts: object) -> bool:
    """A list of prompts, as against one prompt that is itself a list of ids or messages."""
    if isinstance(prompts, Infill):
        return False
    if not isinstance(prompts, str) and not hasattr(prompts, "__len__"):
        raise not_a_prompt(prompts)  # a generator, say, or None
    if not isinstance(prompts, list | tuple):
        return False
    if not prompts:
        return True
    first = prompts[0]
    return isinstance(first, str | Infill) or (
        hasattr(first, "__len__") and not isinstance(first, Mapping)
    )


def check_chat(prompt: Prompt, tokenizer: Tokenizer | None, config: DecodeConfig) -> None:
    """PromptError for a chat that the built-in model cannot read; other models get anything.

    Plain text is continued, whatever it is. So is a chat whose answer has to fit a pattern.
    """
    if tokenizer is None or not tokenizer.is_built_in or config.is_constrained:
        return
    last = prompt[-1] if isinstance(prompt, list | tuple) and prompt else None
    if isinstance(last, Mapping):
        questions.check(str(last.get("content", "")))


def _is_chat(prompt: object) -> bool:
    return isinstance(prompt, list | tuple) and any(isinstance(p, Mapping) for p in prompt)


def encode(
    prompt: Text,
    tokenizer: Tokenizer | None,
    config: ModelConfig,
    at_most: int | None = None,
    *,
    whole: bool = True,
) -> list[int]:
    """The token ids of a prompt, checked: this is the only place where a prompt is.

    PromptError for more than `at_most` of them.
    whole: it is asked as it is, so that a question of the built-in model gets its line break; not
    so text with a gap behind it.
    """
    given: Any = prompt
    if isinstance(prompt, str) or _is_chat(prompt):
        if tokenizer is None:
            raise PromptError("this model has no tokenizer: give the prompt as token ids")
        if isinstance(prompt, str):
            is_question = whole and tokenizer.is_built_in
            given = tokenizer.encode(questions.complete(prompt) if is_question else prompt)
        else:
            given = tokenizer.chat(given)
    if at_most is not None and hasattr(given, "__len__") and len(given) > at_most:
        raise PromptError(f"the prompt has {len(given)} tokens and {at_most} fit: shorten it")
    ids = token_ids(given, config.vocab_size)
    if not ids:
        raise PromptError("the prompt is empty: give at least one token")
    if config.mask_id in ids:
        raise PromptError("the prompt contains the mask token: take it out")
    return ids


def encode_gaps(
    gaps: Sequence[tuple[GapTokens, str | Sequence[int]]],
    tokenizer: Tokenizer | None,
    config: ModelConfig,
    most: int,  # tokens of a gap whose length is not given
) -> list[Gap]:
    """Gaps with the ids of the text behind each, checked."""
    found = []
    for tokens, text in gaps:
        if not isinstance(text, str) and not hasattr(text, "__len__"):
            raise PromptError(f"text behind a gap is a string or token ids: got {text!r}")
        if not len(text):
            raise PromptError("there is no text behind the gap: give some, or use generate")
        after = encode(text, tokenizer, config, whole=False)
        found.append(Gap(_gap_lengths(tokens, most), tuple(after)))
    if len(found) > 1 and any(len(gap.lengths) > 1 for gap in found):
        raise PromptError("of several gaps the lengths have to be given: one number of tokens each")
    return found


def _gap_lengths(tokens: GapTokens, most: int) -> tuple[int, ...]:
    if tokens is None:
        return lengths_to_try(most)
    given: Any = tokens
    try:
        lengths = tuple(
            operator.index(n) for n in (given if hasattr(given, "__iter__") else [given])
        )
        if not lengths or min(lengths) < 1 or isinstance(given, bool | str):
            raise TypeError
    except TypeError:
        raise PromptError(
            f"a gap has a number of tokens, at least 1, or several to choose from: got {given!r}"
        ) from None
    if len(lengths) > MOST_LENGTHS:
        raise PromptError(f"{len(lengths)} lengths are too many: give {MOST_LENGTHS} or fewer")
    return lengths


def token_ids(given: Any, vocab_size: int) -> list[int]:
    """Token ids as plain integers, each in the vocabulary."""
    if isinstance(given, bytes | Mapping | set) or not hasattr(given, "__len__"):
        raise not_a_prompt(given)
    return [token_id("token id", i, vocab_size) for i in given]


def token_id(what: str, value: object, vocab_size: int) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        value = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise PromptError(f"{what} must be a whole number: got {value!r}") from None
    if not 0 <= value < vocab_size:
        raise PromptError(f"{what} {value} is outside the vocabulary of {vocab_size}")
    return value
