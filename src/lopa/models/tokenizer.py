"""Text to token ids and back, chats to token ids, and text out of a growing list of ids.

Text is either ordinary (a user's) or trusted (written by a chat template). In ordinary text the
string of an added token such as <|im_end|> is just characters, so a prompt cannot forge the
structure of a conversation. Two tokenizers of the `tokenizers` library are kept for this, one that
knows the added tokens and one that does not: the library's own switch (`encode_special_tokens`) is
mutable state shared between threads, and ignores added tokens that are not marked special.

Non-goals: SentencePiece and WordPiece files without a tokenizer.json, training, padding,
truncation, and adding a BOS of its own (a template writes it where the model wants one).
"""

from __future__ import annotations

import codecs
import json
import re
import secrets
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

from lopa.errors import CheckpointError, PromptError

if TYPE_CHECKING:
    from lopa.models.chat import ChatTemplate

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
_CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_MARKUP = re.compile(r"<.+>|\[.+\]")
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # how byte-fallback vocabularies spell a byte


def _byte_alphabet() -> dict[int, str]:
    """GPT-2's byte-level alphabet: printable Latin-1 bytes as themselves, the rest from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    rest = [byte for byte in range(256) if byte not in printable]
    shifted = {byte: chr(256 + offset) for offset, byte in enumerate(rest)}
    return {byte: shifted.get(byte, chr(byte)) for byte in range(256)}


_CHAR_OF_BYTE = _byte_alphabet()
_BYTE_OF_CHAR = {char: byte for byte, char in _CHAR_OF_BYTE.items()}


class Tokenizer:
    """The tokenizer of one checkpoint. Immutable after construction and safe across threads.

    vocab_size     one past the largest id (ids between may be unused; a model's embedding may
                   have more rows)
    special_ids    tokens that are structure, never text: `decode` leaves them out
    chat_template  the jinja2 source `chat` renders, or None
    """

    def __init__(
        self,
        spec: Mapping[str, Any],
        *,
        source: str = "tokenizer.json",
        chat_template: str | None = None,
        named: Mapping[str, str] | None = None,
    ) -> None:
        """`spec` is the content of a tokenizer.json; `source` is the file named in errors.

        `named` maps bos_token, eos_token, … to their strings, for the template. Made by the
        class methods; CheckpointError if the library cannot hold the tokens at their ids.
        """
        added: list[dict[str, Any]] = sorted(spec["added_tokens"], key=lambda token: token["id"])
        model = spec["model"]
        self._full = _build(spec, added, source)
        self._plain = _without_added(self._full, added)
        self._names: dict[int, str] = {token["id"]: token["content"] for token in added}
        self.special_ids: frozenset[int] = frozenset(
            token["id"] for token in added if token["special"]
        )
        self.vocab_size: int = max(self._full.get_vocab().values(), default=-1) + 1
        unknown = model.get("unk_id")
        if isinstance(model.get("unk_token"), str):
            unknown = self._full.token_to_id(model["unk_token"])
        # What ordinary text must never become. The unknown token is what odd text does become,
        # and an added token may merely repeat a word of the vocabulary.
        self._control = frozenset(
            token["id"]
            for token in added
            if token["content"].strip()
            and token["id"] != unknown
            and (token["special"] or _encode(self._plain, token["content"]).ids != [token["id"]])
        )
        self._byte_level = _is_byte_level(spec.get("decoder"))

        strings = set(self._names.values())
        if chat_template is None and {"<|im_start|>", "<|im_end|>"} <= strings:
            chat_template = _CHATML
        self.chat_template: str | None = chat_template
        self._named = dict(named or {})
        self._chat: ChatTemplate | None = None

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer | None:
        """The tokenizer of a model folder; None when it holds no tokenizer file at all.

        tokenizer.json, or vocab.json + merges.txt (byte-level BPE as Qwen2, Dream and GPT-2 have
        it), each with the added tokens of tokenizer_config.json and added_tokens.json. Ids are
        those of the files. CheckpointError on files that are damaged, missing or at odds.
        """
        present = [name for name in _FILES if (folder / name).is_file()]
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
        template = _read_template(folder, config)
        return cls(spec, source=source, chat_template=template, named=named)

    @classmethod
    def byte_level(cls, specials: Mapping[str, int]) -> Tokenizer:
        """A tokenizer without files: ids 0 to 255 are the bytes, `specials` are special tokens."""
        ids = list(specials.values())
        if len(set(ids)) != len(ids) or any(i < 256 for i in ids) or "" in specials:
            raise ValueError("special tokens need distinct ids from 256 up and non-empty names")
        vocab = {char: byte for byte, char in _CHAR_OF_BYTE.items()}
        spec = _byte_level_spec(vocab, [], None, [_byte_level_part(False)])
        spec["added_tokens"] = [_added(text, i, {}) for text, i in specials.items()]
        return cls(spec, source="byte-level tokenizer")

    def encode(self, text: str, specials: bool = False) -> list[int]:
        """Ids of `text`, nothing added. Added tokens are recognised only with `specials`.

        Pass `specials` only for text the program or a template wrote. PromptError when the text
        is not valid Unicode.
        """
        if specials:
            return list(_encode(self._full, text).ids)
        encoding = _encode(self._plain, text)
        if self._control.isdisjoint(encoding.ids):
            return list(encoding.ids)
        # Where the vocabulary holds the structure tokens too, some models (Unigram) can reach
        # them as they do any word; spell those out character by character.
        ids: list[int] = []
        for token_id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token_id not in self._control:
                ids.append(token_id)
                continue
            for char in text[start:end]:
                ids += [i for i in _encode(self._plain, char).ids if i not in self._control]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`; special tokens and ids outside the vocabulary are left out.

        Bytes that are not UTF-8 become U+FFFD.
        """
        if self._byte_level:
            return self._bytes(ids).decode("utf-8", "replace")
        return self._full.decode(self._visible(ids), skip_special_tokens=True)

    def piece(self, token_id: int) -> str:
        """How one token is shown to a person: added tokens by name, unknown ids as ⟨id⟩.

        A token that holds only part of a character shows U+FFFD, so pieces need not add up to
        what `decode` says.
        """
        name = self._token(token_id)
        if name is None:
            return f"⟨{token_id}⟩"
        if token_id in self._names:
            return name
        if self._byte_level:
            return _token_bytes(name).decode("utf-8", "replace")
        if byte := _BYTE_PIECE.fullmatch(name):
            return bytes([int(byte[1], 16)]).decode("utf-8", "replace")
        return name.replace("▁", " ")

    def token_id(self, text: str) -> int | None:
        """The id of the single token that stands for `text`, or whose vocabulary name it is."""
        if text in self._names.values():
            return self._full.token_to_id(text)
        try:
            encoded = text.encode()
        except UnicodeEncodeError:  # a lone surrogate is in no vocabulary
            return None
        if self._byte_level:
            forms = ["".join(_CHAR_OF_BYTE[byte] for byte in encoded), text]
        else:
            forms = [text, text.replace(" ", "▁")]
        found = (self._full.token_to_id(form) for form in forms)
        return next((i for i in found if i is not None), None)

    def chat(
        self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True
    ) -> list[int]:
        """Ids of a conversation, laid out by the chat template.

        Added tokens written by the template become their ids; the same strings in a message stay
        ordinary text. The one exception: an assistant message keeps added tokens that are not
        special (<think> and the like), the model's own markup, which templates look for.
        PromptError for messages that are not {"role": str, "content": str}, or without a
        template. Non-goal: a template that itself cuts and joins parts of a message may still
        spell an added token with them.
        """
        _check_messages(messages)
        if self.chat_template is None:
            raise PromptError("this model has no chat template; pass the prompt as plain text")
        if self._chat is None:
            try:
                from lopa.models.chat import ChatTemplate
            except ImportError as error:
                raise PromptError("chat templates need jinja2; install it") from error
            self._chat = ChatTemplate(self.chat_template, self._named)
        hidden: dict[str, str] = {}
        safe = []
        for message in messages:
            own = message["role"] == "assistant"
            risky = self._control & self.special_ids if own else self._control
            safe.append({key: self._hide(text, risky, hidden) for key, text in message.items()})
        rendered = self._chat.render(safe, add_generation_prompt)
        if not hidden:
            return self.encode(rendered, specials=True)
        return self._encode_hidden(rendered, hidden)

    def _hide(self, text: str, risky: Container[int], hidden: dict[str, str]) -> str:
        """`text` with each token of `risky` in it replaced by a placeholder, noted in `hidden`."""
        encoding = _encode(self._full, text)  # the library knows best what it would match
        parts, end = [], 0
        for token_id, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True):
            if token_id in risky:
                # Random, so that no message can contain one; private-use characters have no case
                # and are not white space, so the usual template filters leave them alone.
                mark = "".join(chr(0xE000 + secrets.randbelow(0x1900)) for _ in range(8))
                hidden[mark] = text[start:stop]
                parts += [text[end:start], mark]
                end = stop
        return "".join([*parts, text[end:]])

    def _encode_hidden(self, rendered: str, hidden: Mapping[str, str]) -> list[int]:
        """Ids of a rendered chat, the placeholders put back as ordinary text.

        The text between two of the template's added tokens is tokenised as one piece, so hidden
        words get the tokens they would have in any other ordinary text.
        """
        marks = re.compile("|".join(map(re.escape, hidden)))
        encoding = _encode(self._full, rendered)
        ids: list[int] = []
        between: list[int] = []
        begin = 0

        def close(end: int) -> None:
            text = rendered[begin:end]
            restored = marks.sub(lambda match: hidden[match[0]], text)
            ids.extend(between if restored == text else self.encode(restored))

        for token_id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token_id in self._control:
                close(start)
                ids.append(token_id)
                between, begin = [], end
            else:
                between.append(token_id)
        close(len(rendered))
        return ids

    def _token(self, token_id: int) -> str | None:
        if not 0 <= token_id < self.vocab_size:  # the library overflows on ids it cannot hold
            return None
        return self._full.id_to_token(token_id)

    def _visible(self, ids: Sequence[int]) -> list[int]:
        return [i for i in ids if i not in self.special_ids and self._token(i) is not None]

    def _bytes(self, ids: Sequence[int]) -> bytes:
        """The bytes of a byte-level vocabulary's visible tokens."""
        parts = []
        for i in ids:
            name = None if i in self.special_ids else self._token(i)
            if name is not None:
                parts.append(name.encode() if i in self._names else _token_bytes(name))
        return b"".join(parts)


class StreamDecoder:
    """The text of a list of ids that only grows, given out piece by piece.

    The outputs of push and flush together are `decode` of all the ids; no output ends inside a
    character. The work of a push depends on the new ids and what is held back, not on the whole
    list. Not thread-safe. Ids that are later replaced are not its business: push settled ones.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        # For vocabularies that are not byte-level: the last token given out, whose presence
        # decides how the next one is spaced, then the tokens held back.
        self._window: list[int] = []
        self._given = 0  # characters of the window's text that are out

    def push(self, ids: Sequence[int]) -> str:
        """The text that `ids` complete; may be empty."""
        if self._tokenizer._byte_level:
            return self._utf8.decode(self._tokenizer._bytes(ids))
        self._window += self._tokenizer._visible(ids)
        return self._settle(final=False)

    def flush(self) -> str:
        """What is still held back, incomplete characters as U+FFFD. A push after it starts anew."""
        if self._tokenizer._byte_level:
            return self._utf8.decode(b"", True)
        text = self._settle(final=True)
        self._window, self._given = [], 0
        return text

    def _settle(self, final: bool) -> str:
        if not self._window:
            return ""
        text = self._tokenizer.decode(self._window)
        # A run of byte tokens is decoded as a whole, so one bad byte changes the characters
        # before it: wait for the run to end.
        last = self._tokenizer._token(self._window[-1]) or ""
        if not final and (text.endswith("\ufffd") or _BYTE_PIECE.fullmatch(last)):
            return ""
        new = text[self._given :]
        self._window = self._window[-1:]
        self._given = len(self._tokenizer.decode(self._window))
        return new


def _encode(tokenizer: tokenizers.Tokenizer, text: str) -> tokenizers.Encoding:
    try:
        return tokenizer.encode(text, add_special_tokens=False)
    except TypeError:  # what the library makes of a lone surrogate
        raise PromptError(
            "the text is not valid Unicode (a lone surrogate); pass text that UTF-8 can hold"
        ) from None


def _token_bytes(name: str) -> bytes:
    try:
        return bytes([_BYTE_OF_CHAR[char] for char in name])
    except KeyError:  # not spelt in the byte alphabet, so it is text as it stands
        return name.encode()


def _check_messages(messages: Any) -> None:
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence) or not messages:
        raise PromptError("messages must be a non-empty list of {role, content}")
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, Mapping):
            raise PromptError(f"message {number} must be an object with role and content")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise PromptError(f"message {number}: {key} must be a string")
        for key, value in message.items():
            # Anything nested would reach the template without its special tokens hidden.
            if not isinstance(key, str) or not isinstance(value, str):
                raise PromptError(f"message {number}: {key} must be a string")


def _build(
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
    try:
        built = tokenizers.Tokenizer.from_str(json.dumps(content, ensure_ascii=False))
    except Exception as error:  # the library raises bare Exception
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{source}: {reason}; download the tokenizer files again") from error
    for token in added:
        got = built.token_to_id(token["content"])
        if got != token["id"]:
            raise CheckpointError(
                f"{source}: added token {token['content']!r} has id {token['id']} but would load "
                f"as {got}; renumber it or download the tokenizer files again"
            )
    return built


def _without_added(
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


def _is_byte_level(decoder: Any) -> bool:
    if not isinstance(decoder, dict):
        return False
    if decoder.get("type") == "Sequence":
        return [_is_byte_level(part) for part in decoder.get("decoders", [])] == [True]
    return decoder.get("type") == "ByteLevel"


def _byte_level_part(use_regex: bool, prefix_space: bool = False) -> dict[str, Any]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": prefix_space,
        "trim_offsets": False,
        "use_regex": use_regex,
    }


def _byte_level_spec(
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
        "decoder": _byte_level_part(False),
        "model": {"type": "BPE", "vocab": dict(vocab), "merges": [list(pair) for pair in merges]},
    }


def _spec_from_vocab(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """What tokenizer.json would say, from vocab.json and merges.txt."""
    for have, lack in (("vocab.json", "merges.txt"), ("merges.txt", "vocab.json")):
        if not (folder / lack).is_file():
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
    for number, line in enumerate(_read_text(folder / "merges.txt").split("\n"), start=1):
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
        return _byte_level_spec(vocab, merges, None, [_byte_level_part(True, prefix_space)])
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
    parts = [split, _byte_level_part(False, prefix_space)]
    return _byte_level_spec(vocab, merges, {"type": "NFC"}, parts)


def _added(content: str, token_id: int, flags: Mapping[str, Any]) -> dict[str, Any]:
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
        found.setdefault(content, _added(content, i, flags))
    for content in named & ids.keys():
        if content in found:
            found[content]["special"] = True
        elif _MARKUP.fullmatch(content):
            found[content] = _added(content, ids[content], {})
    return list(found.values())


def _token_text(value: Any) -> str | None:
    """A token in tokenizer_config.json: its string, or an object that holds it."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _read_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return _read_text(path)
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {item.get("name"): item.get("template") for item in template if _is_object(item)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise CheckpointError(
            "tokenizer_config.json: chat_template is not text; mend it or add chat_template.jinja"
        )
    return template


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _typed(value: Any, kind: type, file: str, what: str) -> Any:
    if not isinstance(value, kind):
        raise CheckpointError(f"{file}: {what} is malformed; download the file again")
    return value


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"{path.name}: cannot be read as text ({error}); download the file again"
        ) from error


def _read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; {} when there is no such file."""
    if not path.exists():
        return {}
    try:
        value = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path.name}: not valid JSON ({error}); download the file again"
        ) from error
    return dict(_typed(value, dict, path.name, "the content"))
