"""Prompts as callers give them: text, chat messages or token ids, one or a list of those."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from lopa.errors import PromptError
from lopa.models.config import ModelConfig
from lopa.models.tokenizer import Tokenizer

Messages: TypeAlias = Sequence[Mapping[str, str]]
Prompt: TypeAlias = str | Messages | Sequence[int]
Batch: TypeAlias = list[str] | Sequence[Messages] | Sequence[Sequence[int]]


def not_a_prompt(given: object) -> PromptError:
    return PromptError(
        "a prompt is text, a list of chat messages or a list of token ids: "
        f"got {type(given).__name__}"
    )


def is_batch(prompts: object) -> bool:
    """A list of prompts, as against one prompt that is itself a list of ids or messages."""
    if not isinstance(prompts, str) and not hasattr(prompts, "__len__"):
        raise not_a_prompt(prompts)  # a generator, say, or None
    if not isinstance(prompts, list | tuple):
        return False
    if not prompts:
        return True
    first = prompts[0]
    return isinstance(first, str) or (hasattr(first, "__len__") and not isinstance(first, Mapping))


def encode(
    prompt: Prompt, tokenizer: Tokenizer | None, config: ModelConfig, at_most: int | None = None
) -> list[int]:
    """The token ids of a prompt, checked: this is the only place where a prompt is.

    PromptError for more than `at_most` of them.
    """
    given: Any = prompt
    is_chat = isinstance(prompt, list | tuple) and any(isinstance(p, Mapping) for p in prompt)
    if isinstance(prompt, str) or is_chat:
        if tokenizer is None:
            raise PromptError("this model has no tokenizer: give the prompt as token ids")
        given = tokenizer.encode(prompt) if isinstance(prompt, str) else tokenizer.chat(given)
    if at_most is not None and hasattr(given, "__len__") and len(given) > at_most:
        raise PromptError(f"the prompt has {len(given)} tokens and {at_most} fit: shorten it")
    ids = token_ids(given, config.vocab_size)
    if not ids:
        raise PromptError("the prompt is empty: give at least one token")
    if config.mask_id in ids:
        raise PromptError("the prompt contains the mask token: take it out")
    return ids


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
