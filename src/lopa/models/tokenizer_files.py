"""The tokenizer files of a model folder, read into what one tokenizer.json would say.

tokenizer.json, or vocab.json + merges.txt (byte-level BPE as Qwen2, Dream and GPT-2 have it), each
with the added tokens of tokenizer_config.json and added_tokens.json. Ids are those of the files.
A file that is damaged, missing or at odds with another is a CheckpointError that names it.

Non-goal: SentencePiece and WordPiece files without a tokenizer.json.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lopa.errors import CheckpointError
from lopa.models.files import read_json, read_text

# Any of these makes a folder one that should hold a whole tokenizer.
_FILES = (
    "tokenizer.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "vocab.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
_NAMED = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_MARKUP = re.compile(r"<.+>|\[.+\]")


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """What the files of one folder say together."""

    spec: dict[str, Any]  # the content of a tokenizer.json, every added token in it
    source: str  # the file that holds the vocabulary, to name in errors
    chat_template: str | None  # jinja2 source
    named: dict[str, str]  # bos_token, eos_token, … and their strings


def read_tokenizer_files(folder: Path) -> TokenizerFiles | None:
    """None when the folder holds no tokenizer file at all; CheckpointError on unusable files."""
    present = [name for name in _FILES if (folder / name).exists()]
    if not present:
        return None
    config = _read_object(folder / "tokenizer_config.json")
    if "tokenizer.json" in present:
        source = "tokenizer.json"
        spec = _read_object(folder / source)
    elif "vocab.json" in present or "merges.txt" in present:
        source = "vocab.json"
        spec = _spec_from_vocab(folder, config)
    else:
        raise CheckpointError(
            f"{present[0]}: there is no vocabulary beside it that can be read; "
            "add tokenizer.json, or vocab.json and merges.txt"
        )
    model = spec.get("model")
    if not isinstance(model, dict) or not isinstance(model.get("vocab"), dict | list):
        raise CheckpointError(f"{source}: it holds no vocabulary; download the file again")
    special = {**_read_object(folder / "special_tokens_map.json"), **config}
    named = {
        f"{name}_token": text
        for name in _NAMED
        if (text := _token_text(special.get(f"{name}_token"))) is not None
    }
    more = special.get("additional_special_tokens")
    extra = [_token_text(item) for item in more] if isinstance(more, list) else []
    spec["added_tokens"] = _added_tokens(
        spec, source, config, folder, {*named.values(), *filter(None, extra)}
    )
    return TokenizerFiles(spec, source, _read_template(folder, config), named)


def byte_level_part(use_regex: bool, prefix_space: bool = False) -> dict[str, Any]:
    """The byte-level pre-tokenizer, or decoder, of a tokenizer.json."""
    return {
        "type": "ByteLevel",
        "add_prefix_space": prefix_space,
        "trim_offsets": False,
        "use_regex": use_regex,
    }


def byte_level_spec(
    vocab: Mapping[str, int],
    merges: Sequence[Sequence[str]],
    normalizer: Mapping[str, Any] | None,
    split: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """The content of a tokenizer.json for byte-level BPE."""
    return {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(split)},
        "post_processor": None,
        "decoder": byte_level_part(False),
        "model": {"type": "BPE", "vocab": dict(vocab), "merges": [list(pair) for pair in merges]},
    }


def added_token(content: str, token_id: int, flags: Mapping[str, Any]) -> dict[str, Any]:
    """One entry of tokenizer.json's added_tokens; special unless `flags` say otherwise."""
    special = flags.get("special") is not False
    return {
        "id": token_id,
        "content": content,
        "single_word": flags.get("single_word") is True,
        "lstrip": flags.get("lstrip") is True,
        "rstrip": flags.get("rstrip") is True,
        "normalized": flags.get("normalized", not special) is True,
        "special": special,
    }


def _spec_from_vocab(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """What tokenizer.json would say, from vocab.json and merges.txt."""
    for have, lack in (("vocab.json", "merges.txt"), ("merges.txt", "vocab.json")):
        if not (folder / lack).exists():
            raise CheckpointError(f"{have}: {lack} is missing beside it; download {lack} too")
    vocab = _read_object(folder / "vocab.json")
    owners: dict[int, str] = {}
    for token, i in vocab.items():
        if not isinstance(i, int) or isinstance(i, bool) or i < 0 or i in owners:
            raise CheckpointError(
                f"vocab.json: token {token!r} has no id of its own ({i!r}); download the file again"
            )
        owners[i] = token
    merges = []
    for number, line in enumerate(read_text(folder / "merges.txt").split("\n"), start=1):
        line = line.rstrip("\r")
        if not line or (number == 1 and line.startswith("#version")):
            continue
        pair = line.split(" ")
        if len(pair) != 2:
            raise CheckpointError(
                f"merges.txt: line {number} is not two tokens; download the file again"
            )
        for token in (*pair, "".join(pair)):
            if token not in vocab:
                raise CheckpointError(
                    f"merges.txt: line {number} needs {token!r}, which vocab.json lacks; "
                    "download both files again"
                )
        merges.append(pair)

    prefix_space = config.get("add_prefix_space") is True
    name = str(config.get("tokenizer_class") or "Qwen2Tokenizer")
    if name.startswith("GPT2"):
        return byte_level_spec(vocab, merges, None, [byte_level_part(True, prefix_space)])
    if not name.startswith(("Qwen2", "Dream")):
        # How text is split is not in these files; guessing would give wrong tokens silently.
        raise CheckpointError(
            f"tokenizer_config.json: {name} is not known from vocab.json and merges.txt alone; "
            "add a tokenizer.json"
        )
    split = {
        "type": "Split",
        "pattern": {"Regex": _QWEN2_SPLIT},
        "behavior": "Isolated",
        "invert": False,
    }
    parts = [split, byte_level_part(False, prefix_space)]
    return byte_level_spec(vocab, merges, {"type": "NFC"}, parts)


def _added_tokens(
    spec: Mapping[str, Any],
    source: str,
    config: Mapping[str, Any],
    folder: Path,
    named: set[str],
) -> list[dict[str, Any]]:
    """The added tokens all files together name; CheckpointError where they contradict.

    `named` are the strings the configuration calls bos, eos, …: special if files list them as
    added tokens or, for a vocabulary that holds its own (GPT-2), if they look like markup; some
    checkpoints pad with an ordinary word, which must stay one.
    """
    claims: list[tuple[str, Any, Any, Mapping[str, Any]]] = []  # file, content, id, flags
    for item in _typed(spec.get("added_tokens") or [], list, source, "added_tokens"):
        entry = _typed(item, dict, source, "added_tokens")
        claims.append((source, entry.get("content"), entry.get("id"), entry))
    file = "tokenizer_config.json"
    decoder = _typed(config.get("added_tokens_decoder") or {}, dict, file, "added_tokens_decoder")
    for key, item in decoder.items():
        entry = _typed(item, dict, file, "added_tokens_decoder")
        i = int(key) if key.isascii() and key.isdigit() else key
        claims.append((file, entry.get("content"), i, entry))
    for content, i in _read_object(folder / "added_tokens.json").items():
        claims.append(("added_tokens.json", content, i, {}))

    vocab = spec["model"]["vocab"]
    if isinstance(vocab, list):  # Unigram: [[piece, score], …], numbered by place
        places = ((item[0], i) for i, item in enumerate(vocab) if isinstance(item, list) and item)
        vocab = {piece: i for piece, i in places if isinstance(piece, str)}
    # Ids that are not numbers are left for the library to refuse, with the place in the file.
    ids: dict[str, int] = {token: i for token, i in vocab.items() if isinstance(i, int)}
    owners = {i: token for token, i in ids.items()}
    found: dict[str, dict[str, Any]] = {}
    for file, content, i, flags in claims:
        if not isinstance(content, str) or not content or type(i) is not int or i < 0:
            raise CheckpointError(
                f"{file}: added token {content!r} has id {i!r}; a name and a number are needed, "
                "download the file again"
            )
        if ids.setdefault(content, i) != i or owners.setdefault(i, content) != content:
            other = f"{owners[i]!r} has id {i}" if i in owners else f"it has id {ids[content]}"
            raise CheckpointError(
                f"{file}: added token {content!r} has id {i}, but elsewhere {other}; "
                "download the tokenizer files again"
            )
        found.setdefault(content, added_token(content, i, flags))
    for content in named & ids.keys():
        if content in found:
            found[content]["special"] = True
        elif _MARKUP.fullmatch(content):
            found[content] = added_token(content, ids[content], {})
    return list(found.values())


def _token_text(value: Any) -> str | None:
    """A token in tokenizer_config.json: its string, or an object that holds it."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _read_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.exists():
        return read_text(path)
    template = config.get("chat_template")
    if isinstance(template, list):
        entries = [item for item in template if isinstance(item, dict)]
        template = {item.get("name"): item.get("template") for item in entries}.get("default")
    if template is not None and not isinstance(template, str):
        raise CheckpointError(
            "tokenizer_config.json: chat_template is not text; mend it or add chat_template.jinja"
        )
    return template


def _typed(value: Any, kind: type, file: str, what: str) -> Any:
    if not isinstance(value, kind):
        raise CheckpointError(f"{file}: {what} is malformed; download the file again")
    return value


def _read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; {} when there is no such file."""
    return read_json(path) if path.exists() else {}
