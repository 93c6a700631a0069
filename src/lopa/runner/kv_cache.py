"""The paged KV cache: one pre-allocated pair of tensors, allocated in pages of 64 tokens.

Pages are reference-counted: a prefix that several requests begin with is stored once. When too few
pages are free, `alloc` returns None; that is not an error.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from lopa.kernels import PAGE as PAGE
from lopa.models.config import ModelConfig
from lopa.types import IntArray


def token_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of the keys and values of one token, all layers."""
    return 2 * config.layers * config.kv_heads * config.head_dim * dtype.itemsize


def pages_for(tokens: int) -> int:
    return -(-tokens // PAGE)


def slot_mapping(table: IntArray, start: int, count: int) -> IntArray:
    """Where the positions start … start + count of a sequence lie in the cache.

    table: the sequence's pages, in order.
    """
    at = np.arange(start, start + count)
    found: IntArray = table[at // PAGE] * PAGE + at % PAGE
    return found


class KVCache:
    def __init__(
        self, config: ModelConfig, device: torch.device, dtype: torch.dtype, tokens: int
    ) -> None:
        self.total_pages = pages_for(tokens)
        # [layers, pages · 64, kv_heads, d]; a CPU commits the memory when it is first written
        shape = (config.layers, self.total_pages * PAGE, config.kv_heads, config.head_dim)
        self.keys = torch.empty(shape, device=device, dtype=dtype)
        self.values = torch.empty(shape, device=device, dtype=dtype)
        self._free = list(range(self.total_pages - 1, -1, -1))
        self._references = [0] * self.total_pages

    @property
    def free_pages(self) -> int:
        return len(self._free)

    @property
    def used_pages(self) -> int:
        return self.total_pages - self.free_pages

    def alloc(self, count: int) -> list[int] | None:
        """`count` pages with one reference each; None when fewer are free."""
        if count > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def incref(self, pages: Sequence[int]) -> None:
        for page in pages:
            if not self._references[page]:
                raise RuntimeError(f"page {page} is free: it cannot be shared")
            self._references[page] += 1

    def free(self, pages: Sequence[int]) -> None:
        """Drop one reference to each; a page without references is free."""
        for page in pages:
            if not self._references[page]:
                raise RuntimeError(f"page {page} is free already")
            self._references[page] -= 1
            if not self._references[page]:
                self._free.append(page)
