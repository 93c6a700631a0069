"""What an answer has to fit, as an automaton over the tokens of a model: compiled once and kept.

In memory by tokenizer and pattern, and on disk beside what rounds cost. A file that cannot be read
counts as none, and a folder that cannot be written is no error: the next process compiles again.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections import OrderedDict
from collections.abc import Collection
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Protocol
from zipfile import BadZipFile

import numpy as np

from lopa.atomic_write import write_bytes
from lopa.cache_folder import cache_folder
from lopa.config import DecodeConfig
from lopa.errors import ConfigError, LopaError
from lopa.grammar import json_schema, regex
from lopa.grammar.automaton import Dfa
from lopa.grammar.token_automaton import Spelling, TokenAutomaton, lift
from lopa.grammar.utf8 import to_bytes
from lopa.version import VERSION

MAX_KEPT = 64  # automata in memory
MAX_FILES = 256
_MAX_FILE_BYTES = 64_000_000  # a larger one is compiled again
_ARRAYS = ("class_of", "next", "accepting", "distance")


class TokenBytes(Protocol):
    """What is asked of a tokenizer."""

    def token_bytes(self) -> tuple[list[bytes | None], list[bytes | None] | None]:
        """The bytes of each token, and of each as the first one where that differs."""


class Compiler:
    """Compiles for one model; several threads may use it."""

    def __init__(
        self,
        tokenizer: TokenBytes | None,
        *,
        vocab_size: int,  # of the model: there may be more logits than tokens
        forbidden: Collection[int],  # tokens that are never an answer's, such as the mask
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._forbidden = sorted(forbidden)
        self._spellings: tuple[Spelling, Spelling | None] | None = None
        self._identity = ""
        self._lock = threading.Lock()
        # Refusals too: the same bad pattern may come again and again.
        self._kept: OrderedDict[str, TokenAutomaton | ConfigError] = OrderedDict()

    def compile_for(self, config: DecodeConfig, eos_ids: Collection[int]) -> TokenAutomaton | None:
        """What answers with these settings have to fit; None: nothing.

        ConfigError says what is wrong with the pattern, or why it cannot be kept to.
        """
        if config.schema is None and config.regex is None:
            return None
        if self._tokenizer is None:
            raise ConfigError("a schema or a regex needs a tokenizer, and this model has none")
        with self._lock:
            later, first = self._spell(self._tokenizer)
            about = [self._identity, config.schema, config.regex, sorted(eos_ids), VERSION]
            key = hashlib.sha256(json.dumps(about).encode()).hexdigest()
            found = self._kept.get(key)
        if found is None:
            found = _load(key)
        if found is None:
            found = self._compile(config, eos_ids, later, first)
            if isinstance(found, TokenAutomaton):
                _save(key, found)
        with self._lock:
            self._kept[key] = found
            self._kept.move_to_end(key)
            while len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        if isinstance(found, ConfigError):
            raise ConfigError(str(found))
        return found

    def _compile(
        self,
        config: DecodeConfig,
        eos_ids: Collection[int],
        later: Spelling,
        first: Spelling | None,
    ) -> TokenAutomaton | ConfigError:
        try:
            dfa = to_bytes(_texts(config))
            return lift(dfa, later, first, eos_ids=eos_ids, forbidden=self._forbidden)
        except ConfigError as error:
            return error

    def _spell(self, tokenizer: TokenBytes) -> tuple[Spelling, Spelling | None]:
        if self._spellings is None:
            later, first = (self._sized(tokens) for tokens in tokenizer.token_bytes())
            assert later is not None
            self._spellings = later, first
            digest = hashlib.sha256(json.dumps([self._vocab_size, self._forbidden]).encode())
            for spelling in (later, first):
                if spelling is not None:
                    digest.update(spelling.starts.tobytes() + spelling.data.tobytes())
            self._identity = digest.hexdigest()
        return self._spellings

    def _sized(self, tokens: list[bytes | None] | None) -> Spelling | None:
        if tokens is None:
            return None
        more = self._vocab_size - len(tokens)
        return Spelling.of([*tokens[: self._vocab_size], *[None] * more])


def _texts(config: DecodeConfig) -> Dfa:
    if isinstance(config.schema, str):
        return json_schema.compile_schema(config.schema)
    assert config.regex is not None
    found = regex.fullmatch(config.regex)
    if found.is_empty:
        raise ConfigError("no text matches the regex: change it")
    return found


def _path(key: str) -> Path:
    """RuntimeError: there is no home folder."""
    return (cache_folder("automata") / f"{key}.npz").expanduser()


def _load(key: str) -> TokenAutomaton | None:
    try:
        path = _path(key)
        with np.load(BytesIO(path.read_bytes()), allow_pickle=False) as file:
            arrays = {name: file[name] for name in _ARRAYS}
            start, end = file["ends"].tolist()
        os.utime(path)  # files not used for long are removed first
    except (OSError, RuntimeError, ValueError, LookupError, EOFError, BadZipFile):
        return None
    return TokenAutomaton(**arrays, start=start, end=end)


def _save(key: str, automaton: TokenAutomaton) -> None:
    if automaton.next.nbytes > _MAX_FILE_BYTES:
        return
    file = BytesIO()
    arrays = {name: getattr(automaton, name) for name in _ARRAYS}
    np.savez_compressed(file, **arrays, ends=[automaton.start, automaton.end])
    with suppress(OSError, RuntimeError, LopaError):
        path = _path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, file.getvalue())
        by_use = sorted(path.parent.glob("*.npz"), key=lambda found: found.stat().st_mtime)
        for unused in by_use[:-MAX_FILES]:
            unused.unlink(missing_ok=True)
