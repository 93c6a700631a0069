"""Text to token ids and back, and chats to token ids.

Text is either ordinary (a user's) or trusted (written by a chat template). In ordinary text the
string of an added token such as <|im_end|> is just characters, so a prompt cannot forge the
structure of a conversation. Two tokenizers of the `tokenizers` library are kept for this, one that
knows the added tokens and one that does not: the library's own switch (`encode_special_tokens`) is
mutable state shared between threads, and ignores added tokens that are not marked special.

Non-goals: training, padding, truncation, and adding a BOS of its own (a template writes it where
the model wants one).
"""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

from lopa.errors import CheckpointError, ConfigError, LopaError, PromptError
from lopa.models.files import BUILT_IN
from lopa.models.tokenizer_files import (
    added_token,
    byte_level_part,
    byte_level_spec,
    read_tokenizer_files,
)
from lopa.models.tokenizer_limits import check_growth, parts

if TYPE_CHECKING:
    from lopa.models.chat import ChatTemplate

_CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# Ling's, which LLaDA2 keeps: the system's turn is always there, and ends with the thinking mode.
_ROLES = (
    "{{ '<role>SYSTEM</role>' }}"
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] + '\\n' }}{% endif %}"
    "{{ 'detailed thinking off<|role_end|>' }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{% set name = 'HUMAN' %}"
    "{% elif message['role'] == 'assistant' %}{% set name = 'ASSISTANT' %}"
    "{% else %}{% set name = 'SYSTEM' %}{% endif %}"
    "{% if not (loop.first and name == 'SYSTEM') %}"
    "{{ '<role>' + name + '</role>' + message['content'] + '<|role_end|>' }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<role>ASSISTANT</role>' }}{% endif %}"
)
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # how byte-fallback vocabularies spell a byte
_LONG = 10_000  # characters, from which on encoding lets other threads run
# Normalizer → characters that can become one. No character decomposes into more than four.
_NORMALIZERS = {"NFC": 4, "NFKC": 4, "NFD": 1, "NFKD": 1}


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
    is_byte_level  the vocabulary spells bytes, so `decode` is UTF-8 of `to_bytes`
    max_characters_per_token
                   most characters of ordinary text that a token can stand for; None when unknown
    chat_template  the jinja2 source `chat` renders, or None
    is_built_in    of the built-in model, which reads questions of its own kinds alone
    """

    def __init__(
        self,
        spec: Mapping[str, Any],
        *,
        source: str = "tokenizer.json",
        chat_template: str | None = None,
        named: Mapping[str, str] | None = None,
        is_built_in: bool = False,
    ) -> None:
        """`spec` is the content of a tokenizer.json; `source` is the file named in errors.

        `named` maps bos_token, eos_token, … to their strings, for the template. Made by the
        class methods; CheckpointError if the library cannot hold the tokens at their ids.
        """
        added: list[dict[str, Any]] = sorted(spec["added_tokens"], key=lambda token: token["id"])
        model = spec["model"]
        self._source = source
        check_growth(spec, source)
        self._full = _build(spec, added, source)
        with _library(CheckpointError, source):
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
            and (token["special"] or self._encode_plain(token["content"]).ids != [token["id"]])
        )
        self.is_byte_level: bool = _is_byte_level(spec.get("decoder"))
        self._joins_pieces = _joins_pieces(spec.get("decoder"))
        self.max_characters_per_token: int | None = _max_characters_per_token(spec)

        strings = set(self._names.values())
        if chat_template is None and {"<|im_start|>", "<|im_end|>"} <= strings:
            chat_template = _CHATML
        elif chat_template is None and "<|role_end|>" in strings:
            chat_template = _ROLES
        self.chat_template: str | None = chat_template
        self.is_built_in = is_built_in
        self._named = dict(named or {})
        self._chat: ChatTemplate | None = None

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer | None:
        """The tokenizer of a model folder; None when it holds no tokenizer file at all.

        CheckpointError on files that are damaged, missing or at odds (see tokenizer_files).
        """
        files = read_tokenizer_files(folder)
        if files is None:
            return None
        return cls(
            files.spec,
            source=files.source,
            chat_template=files.chat_template,
            named=files.named,
            is_built_in=folder in BUILT_IN.values(),
        )

    @classmethod
    def byte_level(cls, specials: Mapping[str, int]) -> Tokenizer:
        """A tokenizer without files: ids 0 to 255 are the bytes, `specials` are special tokens."""
        ids = list(specials.values())
        if len(set(ids)) != len(ids) or any(i < 256 for i in ids) or "" in specials:
            raise ValueError("special tokens need distinct ids from 256 up and non-empty names")
        spec = byte_level_spec(_BYTE_OF_CHAR, [], None, [byte_level_part(False)])
        spec["added_tokens"] = [added_token(text, i, {}) for text, i in specials.items()]
        return cls(spec, source="byte-level tokenizer")

    def encode(self, text: str, specials: bool = False) -> list[int]:
        """Ids of `text`, nothing added. Added tokens are recognised only with `specials`.

        Pass `specials` only for text the program or a template wrote. PromptError when the text
        is not valid Unicode.
        """
        if specials:
            return list(self._encode_full(text).ids)
        encoding = self._encode_plain(text)
        found = encoding.ids  # a copy
        if self._control.isdisjoint(found):
            return found
        # Where the vocabulary holds the structure tokens too, some models (Unigram) can reach
        # them as they do any word; spell those out character by character.
        ids: list[int] = []
        for token_id, (start, end) in zip(found, encoding.offsets, strict=True):
            if token_id not in self._control:
                ids.append(token_id)
                continue
            for char in text[start:end]:
                ids += [i for i in self._encode_plain(char).ids if i not in self._control]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`; special tokens and ids outside the vocabulary are left out.

        Bytes that are not UTF-8 become U+FFFD.
        """
        if self.is_byte_level:
            return self.to_bytes(ids).decode("utf-8", "replace")
        with _library(CheckpointError, self._source):
            return self._full.decode(self.visible(ids), skip_special_tokens=True)

    def visible(self, ids: Sequence[int]) -> list[int]:
        """`ids` without special tokens and ids outside the vocabulary."""
        return [i for i in ids if i not in self.special_ids and self._token(i) is not None]

    def to_bytes(self, ids: Sequence[int]) -> bytes:
        """The bytes of a byte-level vocabulary's visible tokens."""
        parts = []
        for i in ids:
            name = None if i in self.special_ids else self._token(i)
            if name is not None:
                parts.append(name.encode() if i in self._names else _token_bytes(name))
        return b"".join(parts)

    def token_bytes(self) -> tuple[list[bytes | None], list[bytes | None] | None]:
        """The bytes that each token adds to a text, and those of each as the first token.

        None for a token without text, and for one whose bytes depend on others. The second list
        is None where both are the same. ConfigError where the bytes of no token are known.
        """
        ids = range(self.vocab_size)
        if self.is_byte_level:
            return [self.to_bytes([i]) or None for i in ids], None
        plain = (i for i in ids if self.decode([i]).isalnum())
        before = [next(plain, -1)] if self._joins_pieces else [-1]
        if before == [-1]:
            raise ConfigError(
                f"{self._source}: a text is not simply its tokens' texts in this tokenizer, so "
                "that answers cannot be kept to a schema or a regex with this model"
            )
        return self._piece_bytes(before), self._piece_bytes([])

    def _piece_bytes(self, before: list[int]) -> list[bytes | None]:
        """The bytes that each token adds behind `before`."""
        shared = len(self.decode(before))
        found: list[bytes | None] = [None] * self.vocab_size
        visible = self.visible(range(self.vocab_size))
        with _library(CheckpointError, self._source):
            texts = self._full.decode_batch([[*before, i] for i in visible])
        for i, text in zip(visible, texts, strict=True):
            byte = _BYTE_PIECE.fullmatch(self._token(i) or "")
            if byte is not None and int(byte[1], 16) >= 0x80:  # decoded with others of its kind
                found[i] = bytes([int(byte[1], 16)])
            elif "\ufffd" not in text:
                found[i] = text[shared:].encode()
        return found

    def is_byte(self, token_id: int) -> bool:
        """Whether the token is one byte of a byte-fallback vocabulary, as in Llama 2."""
        return _BYTE_PIECE.fullmatch(self._token(token_id) or "") is not None

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
        if self.is_byte_level:
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
        if self.is_byte_level:
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
        encoding = self._encode_full(text)  # the library knows best what it would match
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
        encoding = self._encode_full(rendered)
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

    def _encode_full(self, text: str) -> tokenizers.Encoding:
        return _encode(self._full, text, self._source)

    def _encode_plain(self, text: str) -> tokenizers.Encoding:
        return _encode(self._plain, text, self._source)

    def _token(self, token_id: int) -> str | None:
        if not 0 <= token_id < self.vocab_size:  # the library overflows on ids it cannot hold
            return None
        return self._full.id_to_token(token_id)


@contextmanager
def _library(kind: type[LopaError], source: str) -> Iterator[None]:
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


def _encode(tokenizer: tokenizers.Tokenizer, text: str, source: str) -> tokenizers.Encoding:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PromptError(
            "the text is not valid Unicode (a lone surrogate); pass text that UTF-8 can hold"
        ) from None
    with _library(PromptError, source):
        if len(text) < _LONG:
            return tokenizer.encode(text, add_special_tokens=False)
        # Only the library's batches release the GIL.
        return tokenizer.encode_batch([text], add_special_tokens=False)[0]


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
    with _library(CheckpointError, source):
        built = tokenizers.Tokenizer.from_str(json.dumps(content, ensure_ascii=False))
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


def _joins_pieces(decoder: Any) -> bool:
    """Whether each token adds the same text wherever it stands, but for the first one."""
    for part in parts(decoder, "decoders"):
        kind = part.get("type")
        if kind == "Strip" and (part.get("start", 0) > 1 or part.get("stop", 0)):
            return False
        if kind == "Replace" and len(part.get("pattern", {}).get("String", "")) != 1:
            return False
        if kind not in ("Metaspace", "ByteFallback", "Fuse", "Strip", "Replace"):
            return False
    return decoder is not None


def _max_characters_per_token(spec: Mapping[str, Any]) -> int | None:
    """Known for byte-level BPE where nothing drops text: a token is at most its longest name."""
    model, normalizers = spec["model"], parts(spec.get("normalizer"), "normalizers")
    splits = parts(spec.get("pre_tokenizer"), "pretokenizers")
    kinds = {part.get("type") for part in splits}
    added = spec["added_tokens"]
    if (
        model.get("type") != "BPE"
        or not isinstance(model["vocab"], dict)
        or not _BYTE_OF_CHAR.keys() <= model["vocab"].keys()  # or bytes would be left out
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
