"""The KV cache of the reference runner: one slot a sequence, in one pair of tensors.

It grows when more slots or longer ones are asked for, and a closed slot is used again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lopa.models.config import ModelConfig


class Cache:
    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        shape = (config.layers, 0, 0, config.kv_heads, config.head_dim)
        self.keys = torch.zeros(shape, device=device, dtype=dtype)  # [layers, slots, length, …]
        self.values = torch.zeros_like(self.keys)
        self._free: list[int] = []

    def open(self, capacity: int) -> int:
        """A slot that holds at least `capacity` tokens."""
        slots, length = self.keys.shape[1:3]
        slot = self._free[-1] if self._free else slots
        self._grow(max(slots, slot + 1), max(length, capacity))  # may fail: nothing is taken yet
        if self._free:
            self._free.pop()
        return slot

    def close(self, slot: int) -> None:
        self._free.append(slot)

    def read(self, layer: int, slots: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """slots [R, 1], positions [R, S] → keys and values [R, S, kv_heads, d]."""
        return self.keys[layer, slots, positions], self.values[layer, slots, positions]

    def write(self, slots: Tensor, positions: Tensor, keys: Tensor, values: Tensor) -> None:
        """slots, positions [N]; keys, values [layers, N, kv_heads, d]."""
        self.keys[:, slots, positions] = keys
        self.values[:, slots, positions] = values

    def _grow(self, slots: int, length: int) -> None:
        layers, old_slots, old_length, heads, dim = self.keys.shape
        if (slots, length) == (old_slots, old_length):
            return
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_zeros(layers, slots, length, heads, dim)
            new[:, :old_slots, :old_length] = old
            setattr(self, name, new)
