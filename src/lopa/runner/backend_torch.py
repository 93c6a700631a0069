"""A step: one batch on a device, in plain torch on any device.

It owns what the forwards of a runner share: the staged keys and values of the last batch, its
hidden states, and each slot's carry (the hidden state whose logits predict the first position of a
cached window). What it is told are places: of pages in the pool, of tokens on the flat axis.
`lopa.runner.backend_triton` is the same on fused kernels and graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from lopa.config import DecodeConfig
from lopa.models.transformer import Transformer, rope
from lopa.runner.attention import BatchAttention, Span, sdpa_batch
from lopa.runner.batch import Batch
from lopa.runner.device_timer import Clock
from lopa.runner.kv_cache import PAGE, Pages
from lopa.runner.statistics import Statistics, statistics
from lopa.types import FloatArray, IntArray, Plan

HEAD_ROWS = 4096  # logits are made for at most this many positions at once
Found = tuple[IntArray, FloatArray, FloatArray]  # token, max_prob, ranking: [N] each


class Step:
    works_alone = False  # whether a forward goes on by itself between `begin` and `finish`

    def __init__(
        self, model: Transformer, pages: Pages, attention: BatchAttention = sdpa_batch
    ) -> None:
        self.model = model
        self.pages = pages
        self.attention = attention
        self.device = pages.keys.device
        self.carry = torch.zeros(1, model.config.hidden_size, device=self.device, dtype=self.dtype)
        self.find: Statistics = statistics  # from the model's logits, or from its part of them
        self.clock: Clock | None = None  # of a step that works alone; set by whoever measures
        self._keys: list[Tensor] = []  # staged, by layer: [T, kv_heads, d]
        self._values: list[Tensor] = []
        self._hidden: Tensor | None = None  # [T, hidden]

    @property
    def dtype(self) -> torch.dtype:
        return self.pages.keys.dtype

    def warm_up(self, tokens: int) -> None:
        """Get ready for batches of so many tokens; nothing is to be had here."""

    def open(self, slot: int, pages: Sequence[int]) -> None:
        """A slot begins, or has been given other pages."""
        if slot >= len(self.carry):
            more = torch.zeros_like(self.carry)
            self.carry = torch.cat([self.carry, more])
            self.open(slot, pages)

    def begin(
        self, batch: Batch, tables: Sequence[IntArray], configs: Sequence[DecodeConfig]
    ) -> None:
        """Start a forward; for a step that works alone."""
        raise NotImplementedError

    def finish(self) -> Found:
        """Of the forward that was begun last, with no other one since."""
        raise NotImplementedError

    def forward(
        self, batch: Batch, tables: Sequence[IntArray], configs: Sequence[DecodeConfig]
    ) -> Found:
        """tables: by plan, its slot's pages; configs: by plan."""
        self._keys.clear()
        self._values.clear()

        def stage(layer: int, k: Tensor, v: Tensor) -> None:
            self._keys.append(k)
            self._values.append(v)

        *_, self._hidden = self._layers(batch, tables, stage)
        return self.statistics(batch, self._hidden, configs)

    def settle(self) -> None:
        """What has been committed is in the pool when this is done; it always is, here."""

    def commit(self, source: IntArray, place: IntArray, carries: Sequence[tuple[int, int]]) -> None:
        """Staged tokens `source` go to `place` in the pool; (token, slot) for every carry."""
        assert self._hidden is not None
        at, to = torch.from_numpy(source).to(self.device), torch.from_numpy(place).to(self.device)
        for layer, (k, v) in enumerate(zip(self._keys, self._values, strict=True)):
            self.pages.keys[layer, to] = k[at]
            self.pages.values[layer, to] = v[at]
        for token, slot in carries:
            self.carry[slot] = self._hidden[token]

    def prefill(
        self, batch: Batch, table: IntArray, config: DecodeConfig, layers: int
    ) -> Iterator[Found | None]:
        """One row, so many layers at a time: None until the last one is through.

        A prompt that sees all of itself cannot be cut along its tokens; along its layers it can. A
        row that is alone is the winner, so what it commits goes straight to its pages.
        """
        self.settle()
        ((slot, plan),) = batch.plans
        to = torch.from_numpy(places(table, plan.start, plan.commit)).to(self.device)

        def write(layer: int, k: Tensor, v: Tensor) -> None:
            self.pages.keys[layer, to] = k[: plan.commit]
            self.pages.values[layer, to] = v[: plan.commit]

        stream = self._layers(batch, [table], write)
        for done in range(1, self.model.config.layers + 1):
            next(stream)
            if done % layers == 0 and done < self.model.config.layers:
                yield None
        hidden = next(stream)
        found = self.statistics(batch, hidden, [config])
        if plan.commit:
            self.carry[slot] = hidden[plan.commit - 1]
        yield found

    def staged(self, begin: int, count: int) -> Tensor:
        """Keys, values and the last hidden state of `count` staged tokens, in one flat buffer."""
        assert self._hidden is not None
        here = slice(begin, begin + count)
        keys = torch.stack([k[here] for k in self._keys])
        values = torch.stack([v[here] for v in self._values])
        return torch.cat([keys.flatten(), values.flatten(), self._hidden[here.stop - 1]])

    def install(self, slot: int, place: IntArray, buffer: Tensor) -> None:
        """What `staged` gave, into the pool and the slot's carry."""
        self.settle()
        config = self.model.config
        shape = (config.layers, len(place), config.kv_heads, config.head_dim)
        size = int(np.prod(shape))
        to = torch.from_numpy(place).to(self.device)
        self.pages.keys[:, to] = buffer[:size].view(shape)
        self.pages.values[:, to] = buffer[size : 2 * size].view(shape)
        self.carry[slot] = buffer[2 * size :]

    def copy(self, source: int, target: int) -> None:
        """One page onto another."""
        self.settle()
        for pool in (self.pages.keys, self.pages.values):
            pool[:, target * PAGE : (target + 1) * PAGE] = pool[
                :, source * PAGE : (source + 1) * PAGE
            ]

    @torch.inference_mode()
    def statistics(self, batch: Batch, hidden: Tensor, configs: Sequence[DecodeConfig]) -> Found:
        wanted = batch.wanted
        source = torch.from_numpy(wanted.source).to(self.device)
        rows = hidden[source.clamp(min=0)]
        if (wanted.source < 0).any():
            remembered = source < 0
            rows[remembered] = self.carry[-1 - source[remembered]]
        places = torch.from_numpy(wanted.position).to(self.device)
        rounds = torch.from_numpy(wanted.round).to(self.device)
        found = []
        end = 0
        # Neighbours with the same settings share their calls.
        counts = zip(configs, wanted.counts, strict=True)
        for config, same in groupby(counts, key=lambda item: item[0]):
            begin, end = end, end + sum(count for _, count in same)
            for i in range(begin, end, HEAD_ROWS):
                here = slice(i, min(i + HEAD_ROWS, end))
                logits = self.model.logits(rows[here])
                mask = self.model.config.mask_id
                found.append(self.find(logits, places[here], rounds[here], mask, config))
        if not found:
            return np.zeros(0, np.int64), np.zeros(0), np.zeros(0)
        token, max_prob, ranking = (torch.cat(x).cpu().numpy() for x in zip(*found, strict=True))
        return token, max_prob, ranking

    def _layers(
        self,
        batch: Batch,
        tables: Sequence[IntArray],
        keep: Callable[[int, Tensor, Tensor], None],
    ) -> Iterator[Tensor]:
        """The residual stream after each layer, and at last the normed hidden states."""
        spans = self._spans(batch, tables)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = self.attention(q, k, v, self.pages.keys[layer], self.pages.values[layer], spans)
            keep(layer, k, v)
            return out

        positions = torch.tensor(batch.outline.positions, device=self.device)
        x = self.model.embedding(torch.from_numpy(batch.tokens).to(self.device))
        cos, sin = rope(positions, self.model.config, x.dtype)
        for index, layer in enumerate(self.model.layers):
            x = layer(x, cos, sin, index, attend)
            yield x
        yield self.model.norm(x)

    def _spans(self, batch: Batch, tables: Sequence[IntArray]) -> list[Span]:
        spans, outline = [], batch.outline
        for (_, plan), row, table in zip(batch.plans, outline.first_rows, tables, strict=True):
            lengths = (plan.row_ends - plan.start).tolist()
            blocks = plan.block_ids
            spans.append(
                Span(
                    begin=int(outline.row_begin[row]),
                    lengths=lengths,
                    prefix=torch.from_numpy(seen_places(table, plan)).to(self.device),
                    blocks=None if blocks is None else torch.from_numpy(blocks).to(self.device),
                )
            )
        return spans


def places(table: IntArray, start: int, count: int) -> IntArray:
    """Where the positions start … start + count of a sequence lie in the pool."""
    at = np.arange(start, start + count)
    found: IntArray = table[at // PAGE] * PAGE + at % PAGE
    return found


def seen_places(table: IntArray, plan: Plan) -> IntArray:
    """Places of the cached positions that the plan's window does not replace."""
    before = places(table, 0, min(plan.cached, plan.start))
    end = plan.start + plan.rows.shape[1]
    return np.concatenate([before, places(table, end, max(0, plan.cached - end))])
