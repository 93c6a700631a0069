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

import re
import secrets
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

from lopa.errors import CheckpointError, ConfigError, PromptError
from lopa.models import tokenizer_library as library
from lopa.models.byte_alphabet import BYTE_OF_CHAR, CHAR_OF_BYTE, name_bytes
from lopa.models.files import BUILT_IN
from lopa.models.tokenizer_files import (
    added_token,
    byte_level_part,
    byte_level_spec,
    read_tokenizer_files,
)
from lopa.models.tokenizer_limits import check_growth, max_characters_per_token, parts
from lopa.models.usual_templates import usual_template

if TYPE_CHECKING:
    from lopa.models.chat import ChatTemplate

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # how byte-fallback vocabularies spell a byte


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
        self._full = library.build(spec, added, source)
        with library.errors(CheckpointError, source):
            self._plain = library.without_added(self._full, added)
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
        self.max_characters_per_token: int | None = max_characters_per_token(spec)

        if chat_template is None:
            chat_template = usual_template(set(self._names.values()))
        self.chat_template: str | None = chat_template
        self.is_built_in = is_built_in
        self._named = dict(named or {})
        self._chat: ChatTemplate | None = None
        self._pieces: dict[int, str] = {}  # as they were asked for

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
        spec = byte_level_spec(BYTE_OF_CHAR, [], None, [byte_level_part(False)])
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
        with library.errors(CheckpointError, self._source):
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
                parts.append(name.encode() if i in self._names else name_bytes(name))
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
        with library.errors(CheckpointError, self._source):
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
        found = self._pieces.get(token_id)
        if found is None:
            found = self._pieces[token_id] = self._piece(token_id)
        return found

    def _piece(self, token_id: int) -> str:
        name = self._token(token_id)
        if name is None:
            return f"⟨{token_id}⟩"
        if token_id in self._names:
            return name
        if self.is_byte_level:
            return name_bytes(name).decode("utf-8", "replace")
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
            forms = ["".join(CHAR_OF_BYTE[byte] for byte in encoded), text]
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
        return library.encode(self._full, text, self._source)

    def _encode_plain(self, text: str) -> tokenizers.Encoding:
        return library.encode(self._plain, text, self._source)

    def _token(self, token_id: int) -> str | None:
        if not 0 <= token_id < self.vocab_size:  # the library overflows on ids it cannot hold
            return None
        return self._full.id_to_token(token_id)


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
