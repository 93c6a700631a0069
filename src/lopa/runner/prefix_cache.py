"""Prefixes that requests may share: keys and values kept after their first owner is gone.

`pages` grain: a chain of full pages, each known by its tokens and by what came before it; right
where a token's keys do not depend on later blocks (block-causal models), an approximation under
full attention. `whole` grain: one prompt from end to end, for models whose prompt is a single block
in which everything sees everything. Entries hold their pages until room is needed; the least
recently used go first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from lopa.runner.kv_cache import PAGE, Pages

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


class Prefixes:
    def __init__(self, pages: Pages) -> None:
        self.pages = pages
        self._entries: OrderedDict[Key, Entry] = OrderedDict()  # least recently used first
        self._made = 0

    def __len__(self) -> int:
        return len(self._entries)

    def find_whole(self, prompt: Sequence[int]) -> Entry | None:
        return self._use((_WHOLE, _bytes(prompt)))

    def add_whole(self, prompt: Sequence[int], pages: Sequence[int], carry: Tensor | None) -> None:
        key = (_WHOLE, _bytes(prompt))
        if key not in self._entries:
            self._add(key, list(pages), len(prompt), carry, None)

    def find_pages(self, prompt: Sequence[int], limit: int) -> list[Entry]:
        """The longest known chain of full pages at the beginning, at most `limit` tokens."""
        chain: list[Entry] = []
        while (end := PAGE * (len(chain) + 1)) <= limit:
            before = chain[-1].number if chain else _ROOT
            entry = self._use((before, _bytes(prompt[end - PAGE : end])))
            if entry is None:
                break
            chain.append(entry)
        return chain

    def add_page(self, parent: Entry | None, tokens: Sequence[int], page: int) -> Entry:
        """The page behind `parent` in a chain; the one that is known already, if there is one."""
        key = (_ROOT if parent is None else parent.number, _bytes(tokens))
        known = self._use(key)
        length = PAGE + (0 if parent is None else parent.length)
        return known or self._add(key, [page], length, None, parent)

    def make_room(self, count: int) -> None:
        """Let go of entries until `count` pages are free, or none is left to let go."""
        while self.pages.free < count:
            key = next((k for k, e in self._entries.items() if not e.children), None)
            if key is None:
                return
            entry = self._entries.pop(key)
            if entry.parent is not None:
                entry.parent.children -= 1
            self.pages.give(entry.pages)

    def clear(self) -> None:
        self.make_room(self.pages.count + 1)

    def _use(self, key: Key) -> Entry | None:
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
        return entry

    def _add(
        self, key: Key, pages: list[int], length: int, carry: Tensor | None, parent: Entry | None
    ) -> Entry:
        self.pages.share(pages)
        self._made += 1
        entry = Entry(self._made, pages, length, carry, parent)
        if parent is not None:
            parent.children += 1
        self._entries[key] = entry
        return entry


def _bytes(tokens: Sequence[int]) -> bytes:
    return np.asarray(tokens, np.int64).tobytes()
