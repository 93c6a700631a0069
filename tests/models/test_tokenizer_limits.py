"""Tokenizers that would make text endless, and how much text a token can stand for."""

from __future__ import annotations

import base64
import random
import sys
import unicodedata
from typing import Any

import pytest

from lopa.errors import CheckpointError
from lopa.models.tokenizer import Tokenizer
from lopa.models.tokenizer_files import byte_level_part, byte_level_spec

BYTES = {char: i for i, char in enumerate(Tokenizer.byte_level({})._full.get_vocab())}


def spec(**changes: Any) -> dict[str, Any]:
    return {**byte_level_spec(BYTES, [], None, [byte_level_part(False)]), **changes}


def replace(pattern: str, content: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def sequence(*parts: Any) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": list(parts)}


def charsmap(length: int, content: bytes) -> dict[str, Any]:
    data = base64.b64encode(length.to_bytes(4, "little") + content).decode()
    return {"type": "Precompiled", "precompiled_charsmap": data}


@pytest.mark.parametrize(
    "normalizer",
    [
        sequence(*[replace("i", "ii")] * 40),
        sequence(*[sequence(replace("a", "aaa"))] * 20),
        sequence(*[replace(".", "x" * 20, "Regex")] * 4),
        sequence(*[replace("", "x" * 20)] * 4),
        replace("a", "a" * 1000),
        {"type": "Prepend", "prepend": "a" * 10_000_000},
        sequence(*[{"type": "Prepend", "prepend": "a" * 100}] * 100),
        charsmap(4, b"\0" * 4 + b"a" * 1000 + b"\0"),
    ],
)
def test_text_that_grows_without_end(normalizer: Any) -> None:
    with pytest.raises(
        CheckpointError, match=r"odd\.json: its normalizer makes text more than 256"
    ):
        Tokenizer(spec(normalizer=normalizer), source="odd.json")


def test_decoders_too() -> None:
    decoder = {"type": "Sequence", "decoders": [replace("i", "ii")] * 40}
    with pytest.raises(CheckpointError, match="its decoder makes text"):
        Tokenizer(spec(decoder=decoder))


@pytest.mark.parametrize("length", [0, 2**32 - 4, 100])
def test_maps_that_are_not_as_long_as_they_say(length: int) -> None:
    """The library would ask for so much memory, and end the process."""
    with pytest.raises(CheckpointError, match=r"odd\.json: precompiled_charsmap is cut off"):
        Tokenizer(spec(normalizer=charsmap(length, b"\0" * 64)), source="odd.json")


@pytest.mark.parametrize(
    "normalizer",
    [
        sequence({"type": "Prepend", "prepend": "▁"}, replace(" ", "▁")),
        sequence(replace(r"\s+", " ", "Regex"), replace("``", '"'), replace("''", '"')),
    ],
)
def test_ordinary_replacements(normalizer: Any) -> None:
    assert Tokenizer(spec(normalizer=normalizer)).encode("a b")


def test_no_character_is_made_of_more_than_four() -> None:
    """So that normalization makes text at most four times shorter."""
    most = max(len(unicodedata.normalize("NFD", chr(i))) for i in range(sys.maxunicode + 1))
    assert most == 4


@pytest.mark.parametrize("form", [None, "NFC", "NFKC", "NFD", "NFKD"])
def test_characters_per_token(form: str | None) -> None:
    """No text has more of them than its tokens can hold."""
    vocab = {**BYTES, "aa": 256, "aaaa": 257, "Ã¡": 258}
    merges = [["a", "a"], ["aa", "aa"], ["Ã", "¡"]]
    normalizer = form and {"type": form}
    made = byte_level_spec(vocab, merges, normalizer, [byte_level_part(False)])
    tokenizer = Tokenizer(made)
    most = tokenizer.max_characters_per_token
    assert most == (16 if form in ("NFC", "NFKC") else 4)
    draw = random.Random(0)
    composed = [unicodedata.normalize("NFD", char) for char in "áᾂ각ǖ"]
    for _ in range(200):
        words = draw.choices(["aaaa", "a", " ", "ﷺ", "😀", *composed], k=draw.randrange(1, 30))
        text = "".join(words)
        assert len(text) <= most * len(tokenizer.encode(text))
    assert len("aaaa" * 9) == 4 * len(tokenizer.encode("aaaa" * 9))


@pytest.mark.parametrize(
    "changes",
    [
        {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
        {"normalizer": replace(" ", "")},
        {"pre_tokenizer": None},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False},
            byte_level_part(False)]}},
        {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}},
        {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}},
    ],
)  # fmt: skip
def test_where_text_may_be_dropped_nothing_is_known(changes: Any) -> None:
    assert Tokenizer(spec(**changes)).max_characters_per_token is None


def test_a_long_text_has_the_tokens_of_its_parts() -> None:
    """Long texts go another way through the library."""
    tokenizer = Tokenizer.byte_level({})
    assert tokenizer.encode("abc" * 10_000) == tokenizer.encode("abc") * 10_000
