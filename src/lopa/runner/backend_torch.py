"""The backend in plain torch, on any device: it runs one batch through the model.

A backend owns what the forwards of a runner share: the staged keys and values of the last batch,
its hidden states, and each slot's carry (the hidden state whose logits predict the first position
of a cached window). It knows nothing of sequences: its arguments are indices into the KV cache and
into the flat token axis. `lopa.runner.backend_triton` does the same with kernels and CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from lopa.config import DecodeConfig
from lopa.kernels.compilation import Compiled, Progress
from lopa.models.transformer import Transformer, rope
from lopa.runner.attention import BatchAttention, Span, sdpa_batch
from lopa.runner.batch import Batch
from lopa.runner.class_scores import FindScores, ScoreColumns, class_scores, joined
from lopa.runner.constrained import constrained_statistics
from lopa.runner.device_timer import DeviceTimer
from lopa.runner.kv_cache import PAGE, KVCache, slot_mapping
from lopa.runner.statistics import Statistics, statistics
from lopa.types import Automaton, FloatArray, IntArray, Plan

HEAD_ROWS = 4096  # logits are computed for at most this many positions at once
Found = tuple[IntArray, FloatArray, FloatArray]  # token, max_prob, ranking: [N] each


@dataclass(frozen=True, slots=True)
class PendingStats:
    """Statistics of a forward that was launched; there until the next launch."""

    wait: Callable[[], Found]


class TorchBackend:
    padding: tuple[tuple[int, int], ...] = ()  # of forwards, as `Runner` says
    is_async = False  # whether a forward is still running when `launch` returns

    def __init__(
        self, model: Transformer, kv_cache: KVCache, attention: BatchAttention = sdpa_batch
    ) -> None:
        self.model = model
        self.kv_cache = kv_cache
        self.attention = attention
        self.device = kv_cache.keys.device
        self.carry = torch.zeros(1, model.config.hidden_size, device=self.device, dtype=self.dtype)
        # Set by a rank that has a part of the vocabulary, and so of the logits
        self.statistics: Statistics = statistics
        self.class_scores: FindScores = class_scores
        self.timer: DeviceTimer | None = None  # of an asynchronous backend; set by `lopa.bench`
        self._keys: list[Tensor] = []  # staged, by layer: [T, kv_heads, d]
        self._values: list[Tensor] = []
        self._hidden: Tensor | None = None  # [T, hidden]

    @property
    def dtype(self) -> torch.dtype:
        return self.kv_cache.keys.dtype

    def warm_up(self, tokens: int, progress: Progress | None = None) -> int:
        """Capture the graphs of batches of up to so many tokens: their number; none here."""
        return 0

    def compile_kernels(
        self,
        progress: Progress | None = None,
        *,
        tokens: int = 0,
        sampling: bool = False,
        fitting: bool = False,
    ) -> list[Compiled]:
        """Compile the kernels of most batches, several at once; there are none here.

        tokens: also of larger ones, up to so many. sampling: also those of a temperature.
        fitting: also those of answers that have to fit an automaton of the usual size.
        """
        return []

    def drop_graphs(self) -> None:
        """Before the ranks of a group part: a graph may hold sums over them; none here."""

    def open(self, slot: int, pages: Sequence[int]) -> None:
        """A slot is opened with these pages."""
        if slot >= len(self.carry):
            more = torch.zeros_like(self.carry)
            self.carry = torch.cat([self.carry, more])
            self.open(slot, pages)

    @property
    def lanes(self) -> int:
        """How many forwards may be in flight at once."""
        return 1

    def forward(
        self,
        batch: Batch,
        tables: Sequence[IntArray],
        configs: Sequence[DecodeConfig],
        lane: int = 0,
    ) -> Found:
        return self.launch(batch, tables, configs, lane).wait()

    def launch(
        self,
        batch: Batch,
        tables: Sequence[IntArray],
        configs: Sequence[DecodeConfig],
        lane: int = 0,
    ) -> PendingStats:
        """tables: by plan, its slot's pages; configs: by plan."""
        self._keys.clear()
        self._values.clear()

        def stage(layer: int, k: Tensor, v: Tensor) -> None:
            self._keys.append(k)
            self._values.append(v)

        *_, self._hidden = self._layers(batch, tables, stage)
        found = self._find_statistics(batch, self._hidden, configs)
        return PendingStats(lambda: found)

    def flush(self) -> None:
        """Write what is committed to the KV cache; here `commit` has done so."""

    def commit(
        self,
        source: IntArray,
        target: IntArray,
        carries: Sequence[tuple[int, int]],
        lane: int = 0,
    ) -> None:
        """Write staged tokens to the KV cache. target: slot mapping; carries: (token, slot)"""
        assert self._hidden is not None
        at, to = (torch.from_numpy(x).to(self.device) for x in (source, target))
        for layer, (k, v) in enumerate(zip(self._keys, self._values, strict=True)):
            self.kv_cache.keys[layer, to] = k[at]
            self.kv_cache.values[layer, to] = v[at]
        for token, slot in carries:
            self.carry[slot] = self._hidden[token]

    def prefill(
        self, batch: Batch, table: IntArray, config: DecodeConfig, layers: int
    ) -> Iterator[Found | None]:
        """One row, `layers` layers per step: None until the last layer is done.

        A prompt whose tokens all see each other cannot be split by tokens, but it can by layers. A
        single row always wins, so its keys and values are written to the KV cache at once.
        """
        self.flush()
        ((slot, plan),) = batch.plans
        to = torch.from_numpy(slot_mapping(table, plan.start, plan.commit)).to(self.device)

        def write(layer: int, k: Tensor, v: Tensor) -> None:
            self.kv_cache.keys[layer, to] = k[: plan.commit]
            self.kv_cache.values[layer, to] = v[: plan.commit]

        stream = self._layers(batch, [table], write)
        for done in range(1, self.model.config.layers + 1):
            next(stream)
            if done % layers == 0 and done < self.model.config.layers:
                yield None
        hidden = next(stream)
        found = self._find_statistics(batch, hidden, [config])
        if plan.commit:
            self.carry[slot] = hidden[plan.commit - 1]
        yield found

    def staged(self, begin: int, count: int) -> Tensor:
        """Keys, values and the last hidden state of `count` staged tokens in one flat buffer."""
        assert self._hidden is not None
        here = slice(begin, begin + count)
        keys = torch.stack([k[here] for k in self._keys])
        values = torch.stack([v[here] for v in self._values])
        return torch.cat([keys.flatten(), values.flatten(), self._hidden[here.stop - 1]])

    def install(self, slot: int, target: IntArray, buffer: Tensor) -> None:
        """Write what `staged` gave to the KV cache and the slot's carry. target: slot mapping"""
        self.flush()
        config = self.model.config
        shape = (config.layers, len(target), config.kv_heads, config.head_dim)
        size = int(np.prod(shape))
        to = torch.from_numpy(target).to(self.device)
        self.kv_cache.keys[:, to] = buffer[:size].view(shape)
        self.kv_cache.values[:, to] = buffer[size : 2 * size].view(shape)
        self.carry[slot] = buffer[2 * size :]

    def copy(self, source: int, target: int) -> None:
        """Copy one page to another."""
        self.flush()
        here, there = (slice(page * PAGE, (page + 1) * PAGE) for page in (source, target))
        for cache in (self.kv_cache.keys, self.kv_cache.values):
            cache[:, there] = cache[:, here]

    @torch.inference_mode()
    def _find_statistics(
        self, batch: Batch, hidden: Tensor, configs: Sequence[DecodeConfig]
    ) -> Found:
        """The statistics of the wanted positions. hidden: [T, hidden]"""
        wanted = batch.wanted
        source = torch.from_numpy(wanted.source).to(self.device)
        rows = hidden[source.clamp(min=0)]
        if (wanted.source < 0).any():
            carried = source < 0
            rows[carried] = self.carry[-1 - source[carried]]
        positions = torch.from_numpy(wanted.position).to(self.device)
        expected = None
        if (asked := batch.expected) is not None:
            expected = torch.from_numpy(asked).to(self.device)
        found: list[Found] = []
        end = 0
        plans = [plan for _, plan in batch.plans]
        # Neighbours with the same settings share a call.
        by_plan = zip(plans, configs, wanted.counts, strict=True)
        for (config, automaton, never), same in groupby(by_plan, key=_settings):
            neighbours = list(same)
            begin, end = end, end + sum(count for _, _, count in neighbours)
            parts = [slice(i, min(i + HEAD_ROWS, end)) for i in range(begin, end, HEAD_ROWS)]
            if automaton is None:
                for here in parts:
                    of_these = None if expected is None else expected[here]
                    found.append(self._plain(rows[here], positions[here], config, never, of_these))
            elif parts:
                scores = [
                    self.class_scores(
                        self.model.logits(rows[here]), positions[here], config, automaton
                    )
                    for here in parts
                ]
                found += self._constrained(neighbours, scores)
        if not found:
            return np.zeros(0, np.int64), np.zeros(0), np.zeros(0)
        token, max_prob, ranking = (np.concatenate(x) for x in zip(*found, strict=True))
        return token, max_prob, ranking

    def _plain(
        self,
        rows: Tensor,
        positions: Tensor,
        config: DecodeConfig,
        never: tuple[int, ...],
        expected: Tensor | None,
    ) -> Found:
        mask, logits = self.model.config.mask_id, self.model.logits(rows)
        found = self.statistics(logits, positions, mask, config, never, expected)
        token, max_prob, ranking = (x.cpu().numpy() for x in found)
        return token, max_prob, ranking

    def _constrained(
        self, plans: Sequence[tuple[Plan, DecodeConfig, int]], scores: Sequence[ScoreColumns]
    ) -> Iterator[Found]:
        """scores: of all plans, in parts"""
        whole, end = joined(scores), 0
        for plan, config, count in plans:
            own = whole.at(slice(end, end := end + count))
            yield constrained_statistics(plan, own, self.model.config.mask_id, config)

    def _layers(
        self,
        batch: Batch,
        tables: Sequence[IntArray],
        keep: Callable[[int, Tensor, Tensor], None],
    ) -> Iterator[Tensor]:
        """The residual stream after each layer, then the normed hidden states."""
        spans = self._spans(batch, tables)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            cache = self.kv_cache.keys[layer], self.kv_cache.values[layer]
            out = self.attention(q, k, v, *cache, spans)
            keep(layer, k, v)
            return out

        positions = torch.tensor(batch.metadata.positions, device=self.device)
        x = self.model.embedding(torch.from_numpy(batch.tokens).to(self.device))
        cos, sin = rope(positions, self.model.config, x.dtype)
        for index, layer in enumerate(self.model.layers):
            x = layer(x, cos, sin, index, attend)
            yield x
        yield self.model.norm(x)

    def _spans(self, batch: Batch, tables: Sequence[IntArray]) -> list[Span]:
        spans, metadata = [], batch.metadata
        for (_, plan), row, table in zip(batch.plans, metadata.first_rows, tables, strict=True):
            lengths = (plan.row_ends - plan.start).tolist()
            blocks = plan.block_ids
            spans.append(
                Span(
                    begin=int(metadata.row_begin[row]),
                    lengths=lengths,
                    prefix=torch.from_numpy(_prefix_slots(table, plan)).to(self.device),
                    blocks=None if blocks is None else torch.from_numpy(blocks).to(self.device),
                )
            )
        return spans


def _settings(
    of_plan: tuple[Plan, DecodeConfig, int],
) -> tuple[DecodeConfig, Automaton | None, tuple[int, ...]]:
    plan, config, _ = of_plan
    return config, None if plan.constraint is None else plan.constraint.automaton, plan.never


def _prefix_slots(table: IntArray, plan: Plan) -> IntArray:
    """The slot mapping of the cached positions outside the plan's window."""
    before = slot_mapping(table, 0, min(plan.cached, plan.start))
    end = plan.start + plan.rows.shape[1]
    return np.concatenate([before, slot_mapping(table, end, max(0, plan.cached - end))])
