"""Runners execute plans. This is the only part that touches a device.

A runner owns one slot (a KV cache) per sequence. `forward` returns the statistics of each plan;
when the decoders have chosen, `commit` writes the winners' keys and values to the caches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lopa.config import AttentionName, DecodeConfig
from lopa.engine.attention import attention
from lopa.engine.statistics import statistics
from lopa.models.transformer import Transformer
from lopa.sequence import Plan, Stats

_HEAD_ROWS = 512  # logits are made for at most this many positions at once


class Runner(Protocol):
    """What an engine needs of a runner; slots are opaque to it."""

    def open(self, config: DecodeConfig, capacity: int) -> int:
        """A slot for one sequence of at most `capacity` tokens."""

    def close(self, slot: int) -> None: ...

    def forward(self, plans: Sequence[tuple[int, Plan]]) -> list[Stats]: ...

    def commit(self, winners: Sequence[tuple[int, int]]) -> None:
        """(slot, winning row) of every plan of the last forward."""


@dataclass(slots=True)
class _Slot:
    config: DecodeConfig
    keys: Tensor  # [layers, capacity, kv_heads, d]
    values: Tensor
    plan: Plan | None = None
    # Written by a forward, for the commit that follows: by layer, [R, commit, kv_heads, d].
    staged_keys: list[Tensor] | None = None
    staged_values: list[Tensor] | None = None
    hidden: Tensor | None = None  # [R, hidden] of the last token to be committed
    # The hidden state whose logits predict the first position of a cached window.
    carry: Tensor | None = None
    carry_position: int = -1


class ReferenceRunner:
    """Plain torch on any device: one batched forward per sequence and round. Correct and simple."""

    def __init__(self, model: Transformer) -> None:
        self.model = model
        self.config = model.config
        parameter = next(model.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        self._slots: dict[int, _Slot] = {}
        self._next = 0

    def open(self, config: DecodeConfig, capacity: int) -> int:
        shape = (self.config.layers, capacity, self.config.kv_heads, self.config.head_dim)
        self._next += 1
        self._slots[self._next] = _Slot(
            config,
            torch.zeros(shape, device=self.device, dtype=self.dtype),
            torch.zeros(shape, device=self.device, dtype=self.dtype),
        )
        return self._next

    def close(self, slot: int) -> None:
        del self._slots[slot]

    @torch.inference_mode()
    def forward(self, plans: Sequence[tuple[int, Plan]]) -> list[Stats]:
        return [self._forward(self._slots[slot], plan) for slot, plan in plans]

    @torch.inference_mode()
    def commit(self, winners: Sequence[tuple[int, int]]) -> None:
        for index, winner in winners:
            slot = self._slots[index]
            plan = slot.plan
            if plan is None or slot.staged_keys is None or slot.staged_values is None:
                raise RuntimeError(f"slot {index} has no forward to commit")
            if plan.commit:
                end = plan.start + plan.commit
                for layer in range(self.config.layers):
                    slot.keys[layer, plan.start : end] = slot.staged_keys[layer][winner]
                    slot.values[layer, plan.start : end] = slot.staged_values[layer][winner]
                assert slot.hidden is not None
                slot.carry, slot.carry_position = slot.hidden[winner].clone(), end - 1
            slot.plan = slot.staged_keys = slot.staged_values = slot.hidden = None

    def _forward(self, slot: _Slot, plan: Plan) -> Stats:
        rows, length = plan.rows.shape
        tokens = torch.from_numpy(plan.rows).to(self.device)
        columns = torch.arange(plan.start, plan.start + length, device=self.device)
        # Cached positions that the window does not replace.
        outside = torch.arange(plan.cached, device=self.device)
        outside = outside[(outside < plan.start) | (outside >= plan.start + length)]
        mask = self._mask(plan, len(outside), columns)
        staged_keys: list[Tensor] = []
        staged_values: list[Tensor] = []

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.view(rows, length, *x.shape[1:]) for x in (q, k, v))
            staged_keys.append(k[:, : plan.commit])
            staged_values.append(v[:, : plan.commit])
            shared_k = slot.keys[layer, outside].expand(rows, -1, -1, -1)
            shared_v = slot.values[layer, outside].expand(rows, -1, -1, -1)
            out = attention(q, torch.cat([shared_k, k], 1), torch.cat([shared_v, v], 1), mask)
            return out.reshape(rows * length, *out.shape[2:])

        hidden = self.model(tokens.view(-1), columns.repeat(rows), attend).view(rows, length, -1)
        slot.plan, slot.staged_keys, slot.staged_values = plan, staged_keys, staged_values
        if plan.commit:
            slot.hidden = hidden[:, plan.commit - 1]
        return self._statistics(slot, plan, hidden, columns)

    def _mask(self, plan: Plan, shared: int, columns: Tensor) -> Tensor | None:
        """[R, L, shared + L]: which keys each query sees; None when it sees all of them."""
        rows, length = plan.rows.shape
        ends = torch.from_numpy(plan.ends).to(self.device)
        ragged = bool((plan.ends != plan.start + length).any())
        if plan.block_ids is None and not ragged:
            return None
        own = (columns[None, :] < ends[:, None])[:, None, :].expand(rows, length, length)
        if plan.block_ids is not None:
            blocks = torch.from_numpy(plan.block_ids).to(self.device)
            own = own & (blocks[None, :] <= blocks[:, None])
        return torch.cat([own.new_ones(rows, length, shared), own], dim=-1)

    def _statistics(self, slot: _Slot, plan: Plan, hidden: Tensor, columns: Tensor) -> Stats:
        wanted = torch.from_numpy(plan.wanted).to(self.device)
        if self.config.shift:
            first = hidden[:, :1]  # position 0 keeps its own row
            if plan.start:
                if bool(wanted[:, 0].any()) and slot.carry_position != plan.start - 1:
                    raise RuntimeError(f"no logits remembered for position {plan.start}")
                if slot.carry is not None:
                    first = slot.carry.expand(len(hidden), 1, -1)
            hidden = torch.cat([first, hidden[:, :-1]], dim=1)
        source = hidden[wanted]
        positions = columns.expand(len(hidden), -1)[wanted]
        token = torch.zeros(wanted.shape, dtype=torch.int64, device=self.device)
        max_prob = torch.zeros(wanted.shape, dtype=torch.float32, device=self.device)
        ranking = torch.zeros_like(max_prob)
        found = [
            statistics(
                self.model.logits(source[i : i + _HEAD_ROWS]),
                positions[i : i + _HEAD_ROWS],
                plan.index,
                self.config.mask_id,
                slot.config,
            )
            for i in range(0, len(source), _HEAD_ROWS)
        ]
        if found:
            token[wanted], max_prob[wanted], ranking[wanted] = map(
                torch.cat, zip(*found, strict=True)
            )
        return Stats(token.cpu().numpy(), max_prob.cpu().numpy(), ranking.cpu().numpy())


@torch.inference_mode()
def raw_logits(
    model: Transformer,
    token_ids: Sequence[int],
    kind: AttentionName = "full",
    prompt_len: int = 0,
    block_size: int = 1,
) -> Tensor:
    """[T, vocab] raw rows of one sequence without a cache, in fp32."""
    device = next(model.parameters()).device
    tokens = torch.tensor(token_ids, dtype=torch.int64, device=device)
    positions = torch.arange(len(tokens), device=device)
    mask = None
    if kind == "block":
        blocks = torch.where(positions < prompt_len, -1, (positions - prompt_len) // block_size)
        mask = (blocks[None, :] <= blocks[:, None])[None]

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q[None], k[None], v[None], mask)[0]

    return model.logits(model(tokens, positions, attend)).float()
