"""The paged KV pool: one pre-allocated pair of tensors, handed out in pages of 64 tokens.

A page may be shared (a prefix that several requests begin with): it is free again when the last
holder lets go. Running out is an answer (None), not an error.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lopa.models.config import ModelConfig

PAGE = 64  # tokens; what a tile of the attention kernel reads at once


def token_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of keys and values that one token takes in all layers."""
    return 2 * config.layers * config.kv_heads * config.head_dim * dtype.itemsize


def pages_for(tokens: int) -> int:
    return -(-tokens // PAGE)


class Pages:
    def __init__(
        self, config: ModelConfig, device: torch.device, dtype: torch.dtype, tokens: int
    ) -> None:
        self.count = pages_for(tokens)
        # [layers, pages · 64, kv_heads, d]; on a CPU the memory is taken as it is first written
        shape = (config.layers, self.count * PAGE, config.kv_heads, config.head_dim)
        self.keys = torch.empty(shape, device=device, dtype=dtype)
        self.values = torch.empty(shape, device=device, dtype=dtype)
        self._free = list(range(self.count - 1, -1, -1))
        self._holders = [0] * self.count

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.count - self.free

    def take(self, count: int) -> list[int] | None:
        """`count` pages, or None when there are not so many."""
        if count > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """One more holder."""
        for page in pages:
            if not self._holders[page]:
                raise RuntimeError(f"page {page} is free: nothing to share")
            self._holders[page] += 1

    def give(self, pages: Sequence[int]) -> None:
        """One holder less; a page that nobody holds is free."""
        for page in pages:
            if not self._holders[page]:
                raise RuntimeError(f"page {page} is free already")
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)
