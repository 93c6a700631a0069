"""Text out of a growing list of token ids."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from lopa.models.tokenizer import Tokenizer


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
        if self._tokenizer.is_byte_level:
            return self._utf8.decode(self._tokenizer.to_bytes(ids))
        self._window += self._tokenizer.visible(ids)
        return self._settle(final=False)

    def flush(self) -> str:
        """What is still held back, incomplete characters as U+FFFD. A push after it starts anew."""
        if self._tokenizer.is_byte_level:
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
        open_run = text.endswith("\ufffd") or self._tokenizer.is_byte(self._window[-1])
        if open_run and not final:
            return ""
        new = text[self._given :]
        self._window = self._window[-1:]
        self._given = len(self._tokenizer.decode(self._window))
        return new
