"""The `tokenizers` library: what it makes of a tokenizer.json, and its failures as our errors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import tokenizers

from lopa.errors import CheckpointError, LopaError, PromptError

_LONG = 10_000  # characters, from which on encoding lets other threads run


@contextmanager
def errors(kind: type[LopaError], source: str) -> Iterator[None]:
    """A failure of the `tokenizers` library as an error that names the file.

    The library is Rust: where a file makes it panic, it raises what is no Exception.
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = " ".join(str(error).split())[:300]
        raise kind(f"{source}: {reason}; download the tokenizer files again") from error


def encode(tokenizer: tokenizers.Tokenizer, text: str, source: str) -> tokenizers.Encoding:
    """Of one of the two below; PromptError where the text is not valid Unicode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PromptError(
            "the text is not valid Unicode (a lone surrogate); pass text that UTF-8 can hold"
        ) from None
    with errors(PromptError, source):
        if len(text) < _LONG:
            return tokenizer.encode(text, add_special_tokens=False)
        # Only the library's batches release the GIL.
        return tokenizer.encode_batch([text], add_special_tokens=False)[0]


def build(
    spec: Mapping[str, Any], added: list[dict[str, Any]], source: str
) -> tokenizers.Tokenizer:
    """The library's tokenizer for `spec` with exactly these added tokens, at their ids."""
    model = dict(spec["model"])
    if isinstance(model["vocab"], dict):
        # The library numbers added tokens on from the vocabulary, whatever id the file says,
        # unless the vocabulary itself holds them.
        model["vocab"] = model["vocab"] | {token["content"]: token["id"] for token in added}
    # A saved truncation would silently shorten prompts.
    content = {**spec, "model": model, "added_tokens": added, "truncation": None, "padding": None}
    with errors(CheckpointError, source):
        built = tokenizers.Tokenizer.from_str(json.dumps(content, ensure_ascii=False))
    for token in added:
        got = built.token_to_id(token["content"])
        if got != token["id"]:
            raise CheckpointError(
                f"{source}: added token {token['content']!r} has id {token['id']} but would load "
                f"as {got}; renumber it or download the tokenizer files again"
            )
    return built


def without_added(
    full: tokenizers.Tokenizer, added: Sequence[Mapping[str, Any]]
) -> tokenizers.Tokenizer:
    """`full` without its added tokens; the two share the vocabulary, which nothing changes."""
    plain = tokenizers.Tokenizer(full.model)
    plain.normalizer = full.normalizer
    plain.pre_tokenizer = full.pre_tokenizer
    for token in added:
        content = token["content"]
        # Added tokens that are only white space (indentation in code vocabularies) carry no
        # structure, and leaving them out would change the tokens of ordinary text.
        if not content.strip() and full.model.token_to_id(content) == token["id"]:
            kept = {name: value for name, value in token.items() if name not in ("id", "content")}
            plain.add_tokens([tokenizers.AddedToken(content, **kept)])
    return plain
