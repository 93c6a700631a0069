"""The plain runner that `lopa.runner.paged` is tested against: one padded batch, no pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from lopa.config import DecodeConfig
from lopa.models.config import ModelConfig
from lopa.models.transformer import Transformer
from lopa.runner.attention import sdpa
from lopa.runner.base import SyncRunner, make_stats
from lopa.runner.statistics import statistics
from lopa.types import BoolArray, IntArray, Plan, Stats

_HEAD_ROWS = 4096  # logits are made for at most this many positions at once


class Cache:
    """One slot per sequence in one pair of tensors, which grows as it is needed."""

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


@dataclass(slots=True)
class _Slot:
    config: DecodeConfig
    plan: Plan | None = None  # forwarded and not yet committed
    rows: slice = field(default_factory=lambda: slice(0))  # its rows in the batch of that forward
    # The hidden state whose logits predict the first position of a cached window.
    carry: Tensor | None = None
    carry_position: int = -1


@dataclass(slots=True)
class _Staged:
    """What a forward leaves for the commit that follows it."""

    keys: list[Tensor]  # by layer, [R, L, kv_heads, d]
    values: list[Tensor]
    hidden: Tensor  # [R, L, hidden]


class ReferenceRunner(SyncRunner):
    """Plain torch on any device: all rows of all plans in one padded batch. Correct and simple."""

    def __init__(self, model: Transformer) -> None:
        self.model = model
        self.config = model.config
        parameter = next(model.parameters())
        self.device = parameter.device
        self.cache = Cache(model.config, parameter.device, parameter.dtype)
        self._slots: dict[int, _Slot] = {}
        self._staged: _Staged | None = None

    @property
    def kv_pages(self) -> None:
        return None

    def check(self, capacity: int) -> None:
        """The cache grows as it is needed."""

    def open(self, config: DecodeConfig, capacity: int, prompt: Sequence[int] = ()) -> int:
        slot = self.cache.open(capacity)
        self._slots[slot] = _Slot(config)
        return slot

    def reused(self, slot: int) -> int:
        return 0

    def close(self, slot: int) -> None:
        del self._slots[slot]
        self.cache.close(slot)

    def cost(self, plan: Plan) -> int:
        return plan.rows.size

    @torch.inference_mode()
    def forward(self, plans: Sequence[tuple[int, Plan]]) -> list[Stats]:
        rows = sum(len(plan.rows) for _, plan in plans)
        length = max(plan.rows.shape[1] for _, plan in plans)
        outside = [_outside(plan) for _, plan in plans]
        shared = max(map(len, outside))
        # Everything is laid out on the host and moved at once: [R, …], padding behind.
        tokens = np.full((rows, length), self.config.mask_id, np.int64)
        starts, slots = np.empty((2, rows), np.int64)
        prefix = np.zeros((rows, shared), np.int64)
        seen = np.zeros((rows, length, shared + length), np.bool_)
        seen[:, :, shared] = True  # so that padding attends to something
        wanted = np.zeros((rows, length), np.bool_)
        end = 0
        for (slot, plan), cached in zip(plans, outside, strict=True):
            here = slice(end, end := end + len(plan.rows))
            own = plan.rows.shape[1]
            tokens[here, :own] = plan.rows
            starts[here], slots[here] = plan.start, slot
            prefix[here, : len(cached)] = cached
            seen[here, :own, : len(cached)] = True
            seen[here, :own, shared : shared + own] = _window_mask(plan)
            wanted[here, :own] = plan.wanted
            self._slots[slot].plan, self._slots[slot].rows = plan, here
        positions = torch.from_numpy(starts[:, None] + np.arange(length)).to(self.device)
        mask = None if seen.all() else torch.from_numpy(seen).to(self.device)
        hidden = self._hidden(tokens, positions, slots, prefix, mask)
        return self._statistics(plans, hidden, positions, wanted)

    @torch.inference_mode()
    def commit(self, winners: Sequence[tuple[int, int]]) -> None:
        staged = self._staged
        if staged is None:
            raise RuntimeError("no forward to commit")
        rows, columns, slots, positions = [], [], [], []
        for index, winner in winners:
            slot = self._slots[index]
            plan, slot.plan = slot.plan, None
            if plan is None:
                raise RuntimeError(f"slot {index} has no forward to commit")
            if plan.commit:
                row = slot.rows.start + winner
                rows.append(np.full(plan.commit, row))
                columns.append(np.arange(plan.commit))
                slots.append(np.full(plan.commit, index))
                positions.append(np.arange(plan.start, plan.start + plan.commit))
                slot.carry = staged.hidden[row, plan.commit - 1].clone()
                slot.carry_position = plan.start + plan.commit - 1
        self._staged = None
        if rows:
            at = [
                torch.from_numpy(np.concatenate(x)).to(self.device)
                for x in (rows, columns, slots, positions)
            ]
            keys = torch.stack([layer[at[0], at[1]] for layer in staged.keys])
            values = torch.stack([layer[at[0], at[1]] for layer in staged.values])
            self.cache.write(at[2], at[3], keys, values)

    def _hidden(
        self,
        tokens: IntArray,
        positions: Tensor,
        slots: IntArray,
        prefix: IntArray,
        mask: Tensor | None,
    ) -> Tensor:
        """The normed hidden states [R, L, hidden]; keys and values are staged for a commit."""
        rows, length = tokens.shape
        slot_index = torch.from_numpy(slots).to(self.device)[:, None]
        prefix_index = torch.from_numpy(prefix).to(self.device)
        staged_keys: list[Tensor] = []
        staged_values: list[Tensor] = []

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.view(rows, length, *x.shape[1:]) for x in (q, k, v))
            staged_keys.append(k)
            staged_values.append(v)
            shared_k, shared_v = self.cache.read(layer, slot_index, prefix_index)
            out = sdpa(q, torch.cat([shared_k, k], 1), torch.cat([shared_v, v], 1), mask)
            return out.reshape(rows * length, *out.shape[2:])

        flat = torch.from_numpy(tokens).to(self.device).view(-1)
        hidden: Tensor = self.model(flat, positions.view(-1), attend).view(rows, length, -1)
        self._staged = _Staged(staged_keys, staged_values, hidden)
        return hidden

    def _statistics(
        self,
        plans: Sequence[tuple[int, Plan]],
        hidden: Tensor,
        positions: Tensor,
        wanted: BoolArray,
    ) -> list[Stats]:
        if self.config.shift:
            first = hidden[:, :1].clone()  # position 0 keeps its own row
            for index, plan in plans:
                slot = self._slots[index]
                if slot.carry is not None:
                    first[slot.rows] = slot.carry
                if plan.wanted[:, 0].any() and slot.carry_position != plan.start - 1:
                    raise RuntimeError(f"no logits remembered for position {plan.start}")
            hidden = torch.cat([first, hidden[:, :-1]], dim=1)
        at = torch.from_numpy(wanted).to(self.device)
        source, places = hidden[at], positions[at]
        counts = [int(plan.wanted.sum()) for _, plan in plans]
        expected = None
        if any(plan.expected is not None for _, plan in plans):
            each = [
                np.full(n, -1) if plan.expected is None else plan.expected[plan.wanted]
                for n, (_, plan) in zip(counts, plans, strict=True)
            ]
            expected = torch.from_numpy(np.concatenate(each)).to(self.device)
        found = []
        end = 0
        # Neighbours with the same settings share their calls.
        for (config, never), same in groupby(zip(plans, counts, strict=True), key=self._config_of):
            begin, end = end, end + sum(count for _, count in same)
            for i in range(begin, end, _HEAD_ROWS):
                here = slice(i, min(i + _HEAD_ROWS, end))
                logits = self.model.logits(source[here])
                mask = self.config.mask_id
                asked = None if expected is None else expected[here]
                found.append(statistics(logits, places[here], mask, config, never, asked))
        columns = [torch.cat(x).cpu().numpy() for x in zip(*found, strict=True)]
        pieces = [np.split(x, np.cumsum(counts)[:-1]) for x in columns or np.zeros((3, 0))]
        return [make_stats(*piece) for piece in zip(*pieces, strict=True)]

    def _config_of(
        self, item: tuple[tuple[int, Plan], int]
    ) -> tuple[DecodeConfig, tuple[int, ...]]:
        (slot, plan), _ = item
        return self._slots[slot].config, plan.never


def _outside(plan: Plan) -> IntArray:
    """Cached positions that the plan's window does not replace."""
    cached = np.arange(plan.cached, dtype=np.int64)
    outside: IntArray = cached[(cached < plan.start) | (cached >= plan.start + plan.rows.shape[1])]
    return outside


def _window_mask(plan: Plan) -> BoolArray:
    """[R, L, L]: which positions of its window each position sees."""
    length = plan.rows.shape[1]
    sees = np.arange(plan.start, plan.start + length) < plan.row_ends[:, None]
    mask = np.repeat(sees[:, None, :], length, axis=1)
    if plan.block_ids is not None:
        mask &= plan.block_ids[None, :] <= plan.block_ids[:, None]
    return mask
