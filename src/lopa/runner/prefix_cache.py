"""The prefix cache: keys and values of prompts, kept after the request that computed them.

Two grains. `pages`: a chain of full pages, each keyed by its tokens and the page before it. This is
exact where a token's keys do not depend on later blocks (block-causal models), and an approximation
under full attention. `whole`: one prompt from end to end, for models whose prompt is a single block
in which every token sees every other. Entries keep their pages until `evict` needs them, the least
recently used first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from lopa.runner.kv_cache import PAGE, KVCache

Key = tuple[int, bytes]  # the entry before it (−1: none; −2: a whole prompt), and its tokens
_ROOT, _WHOLE = -1, -2


@dataclass(slots=True)
class Entry:
    number: int
    pages: list[int]
    length: int  # tokens from the beginning, this entry included
    carry: Tensor | None = None  # the hidden state of the last token, for shifted models
    parent: Entry | None = None
    children: int = 0


class PrefixCache:
    def __init__(self, kv_cache: KVCache) -> None:
        self.kv_cache = kv_cache
        self._entries: OrderedDict[Key, Entry] = OrderedDict()  # least recently used first
        self._added = 0  # entries so far, evicted ones included

    def __len__(self) -> int:
        return len(self._entries)

    def find_whole(self, prompt: Sequence[int]) -> Entry | None:
        return self._find((_WHOLE, _bytes(prompt)))

    def add_whole(self, prompt: Sequence[int], pages: Sequence[int], carry: Tensor | None) -> None:
        key = (_WHOLE, _bytes(prompt))
        if key not in self._entries:
            self._add(key, list(pages), len(prompt), carry, None)

    def find_pages(self, prompt: Sequence[int], limit: int) -> list[Entry]:
        """The longest cached chain of full pages at the beginning, at most `limit` tokens."""
        chain: list[Entry] = []
        while (end := PAGE * (len(chain) + 1)) <= limit:
            before = chain[-1].number if chain else _ROOT
            entry = self._find((before, _bytes(prompt[end - PAGE : end])))
            if entry is None:
                break
            chain.append(entry)
        return chain

    def add_page(self, parent: Entry | None, tokens: Sequence[int], page: int) -> Entry:
        """The entry behind `parent` in a chain; an existing one if these tokens are cached."""
        key = (_ROOT if parent is None else parent.number, _bytes(tokens))
        cached = self._find(key)
        length = PAGE + (0 if parent is None else parent.length)
        return cached or self._add(key, [page], length, None, parent)

    def evict(self, count: int) -> None:
        """Drop entries until `count` pages are free, or no entry is left to drop."""
        while self.kv_cache.free_pages < count:
            key = next((k for k, e in self._entries.items() if not e.children), None)
            if key is None:
                return
            entry = self._entries.pop(key)
            if entry.parent is not None:
                entry.parent.children -= 1
            self.kv_cache.free(entry.pages)

    def clear(self) -> None:
        self.evict(self.kv_cache.total_pages + 1)

    def _find(self, key: Key) -> Entry | None:
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
        return entry

    def _add(
        self, key: Key, pages: list[int], length: int, carry: Tensor | None, parent: Entry | None
    ) -> Entry:
        self.kv_cache.incref(pages)
        self._added += 1
        entry = Entry(self._added, pages, length, carry, parent)
        if parent is not None:
            parent.children += 1
        self._entries[key] = entry
        return entry


def _bytes(tokens: Sequence[int]) -> bytes:
    return np.asarray(tokens, np.int64).tobytes()
