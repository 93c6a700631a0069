"""What a tokenizer.json may do to text: make it somewhat longer, and no more.

The library would run out of time or memory where it cannot be stopped: replacements that double a
text forty times over, or a map that says it is 4 GB long. The other way round, there is a limit to
the characters that a token can stand for, where it is known.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Mapping
from typing import Any

from lopa.errors import CheckpointError
from lopa.models.byte_alphabet import BYTE_OF_CHAR

MAX_GROWTH = 256  # times longer; the longest that Unicode's own normalization knows is 18
MAX_PREFIX = 1024  # characters put before a text
# Normalizer → characters that can become one. No character decomposes into more than four.
_NORMALIZERS = {"NFC": 4, "NFKC": 4, "NFD": 1, "NFKD": 1}


def parts(whole: Any, name: str) -> list[dict[str, Any]]:
    """The parts of a normalizer, pre-tokenizer or decoder, which may be sequences of `name`."""
    found, left = [], [whole]
    while left:
        part = left.pop()
        if isinstance(part, dict) and part.get("type") == "Sequence":
            inner = part.get(name)
            left += reversed(inner) if isinstance(inner, list) else []
        elif part is not None:
            found.append(part if isinstance(part, dict) else {})
    return found


def check_growth(spec: Mapping[str, Any], source: str) -> None:
    """CheckpointError for a normalizer or a decoder that makes text too long."""
    for kind, name in (("normalizer", "normalizers"), ("decoder", "decoders")):
        growth, prefix = 1.0, 0
        for part in parts(spec.get(kind), name):
            if part.get("type") == "Replace":
                growth *= _replacement_growth(part)
            elif part.get("type") == "Precompiled":
                growth *= _map_growth(part, source)
            elif part.get("type") == "Prepend":
                prefix += len(str(part.get("prepend")))
            if growth > MAX_GROWTH or prefix > MAX_PREFIX:
                raise CheckpointError(
                    f"{source}: its {kind} makes text more than {MAX_GROWTH} times longer; "
                    "download the tokenizer files again"
                )


def _replacement_growth(part: Mapping[str, Any]) -> float:
    pattern, content = part.get("pattern"), len(str(part.get("content")))
    text = pattern.get("String") if isinstance(pattern, dict) else pattern
    if isinstance(text, str) and text:
        return max(1.0, content / len(text))
    return 1.0 + content  # an expression may match between any two characters


def _map_growth(part: Mapping[str, Any], source: str) -> int:
    """The longest replacement of a character. The map is a length, a trie and the replacements."""
    try:
        content = base64.b64decode(str(part.get("precompiled_charsmap")), validate=True)
    except binascii.Error:
        content = b""
    trie_bytes = int.from_bytes(content[:4], "little")
    if not 0 < trie_bytes <= len(content) - 4:
        raise CheckpointError(
            f"{source}: precompiled_charsmap is cut off; download the tokenizer files again"
        )
    return max(1, *map(len, content[4 + trie_bytes :].split(b"\0")))


def max_characters_per_token(spec: Mapping[str, Any]) -> int | None:
    """Known for byte-level BPE where nothing drops text: a token is at most its longest name."""
    model, normalizers = spec["model"], parts(spec.get("normalizer"), "normalizers")
    splits = parts(spec.get("pre_tokenizer"), "pretokenizers")
    kinds = {part.get("type") for part in splits}
    added = spec["added_tokens"]
    if (
        model.get("type") != "BPE"
        or not isinstance(model["vocab"], dict)
        or not BYTE_OF_CHAR.keys() <= model["vocab"].keys()  # or bytes would be left out
        or model.get("continuing_subword_prefix")
        or model.get("end_of_word_suffix")
        or "ByteLevel" not in kinds
        or not kinds <= {"ByteLevel", "Split", "Digits"}
        or any(part.get("behavior") == "Removed" for part in splits)
        or any(part.get("type") not in _NORMALIZERS for part in normalizers)
        # These take any number of spaces around them along.
        or any(
            token["lstrip"] or token["rstrip"] for token in added if not token["content"].strip()
        )
    ):
        return None
    names = [*model["vocab"], *(token["content"] for token in added)]
    shrinking = [_NORMALIZERS[part["type"]] for part in normalizers]
    return max(map(len, names)) * math.prod(shrinking)
