"""A step on fused kernels and CUDA graphs: what a round costs is the matrix products.

A round is one graph: a copy of integers to the device, the layers, a small copy back. Graphs are
kept by the size of the batch, rounded up; what is rounded up is padding that no tile of the
attention covers and no statistic is read from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache

import numpy as np
import torch
from torch import Tensor

from lopa.config import DecodeConfig
from lopa.engine.batch import Batch
from lopa.engine.kernels import pointwise
from lopa.engine.kernels.attention import TILE, Rows, attend, most_tiles
from lopa.engine.kernels.confidence import RANKINGS, confidence
from lopa.engine.kernels.moves import gather, settle
from lopa.engine.pages import PAGE, Pages, pages_for
from lopa.engine.products import products_on
from lopa.engine.quantize import QuantizedLinear
from lopa.engine.scaled import Scaled
from lopa.engine.step import Found, Step
from lopa.models.transformer import Layer, Transformer, rope
from lopa.sequence import FloatArray, IntArray

_MOST_GRAPHS = 96
_SLOTS = 256  # to begin with
_PROGRAMS = 264  # of the attention, that fill the device about twice
_MOST_SPLITS = 4


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a graph is made for: at most so many tokens, rows, tiles and wanted positions."""

    tokens: int
    rows: int
    tiles: int  # of attention
    wanted: int  # 0: statistics are made outside
    drawing: bool  # whether any of them is drawn


@dataclass(slots=True)
class _Inputs:
    """One buffer of integers, cut into the arrays of a batch; the same cuts on host and device."""

    tokens: Tensor
    positions: Tensor
    rows: Rows  # all but the table
    wanted_from: Tensor
    temperature: Tensor  # fp32
    settings: Tensor  # [N, 4] int64


@dataclass(slots=True)
class _Arrays:
    """The same cuts of a buffer on the host."""

    tokens: IntArray
    positions: IntArray
    blocks: IntArray
    tile_row: IntArray
    tile_at: IntArray
    begin: IntArray
    length: IntArray
    start: IntArray
    cached: IntArray
    slot: IntArray
    wanted_from: IntArray
    temperature: FloatArray
    settings: IntArray

    @classmethod
    def of(cls, inputs: _Inputs) -> _Arrays:
        found = inputs.rows._asdict() | {f.name: getattr(inputs, f.name) for f in fields(inputs)}
        return cls(*(found[field.name].numpy() for field in fields(cls)))


@dataclass(slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    arrays: _Arrays  # parts of a pinned buffer, which a replay reads
    out: IntArray  # [3, N] int32, pinned: token, and the bits of max_prob and ranking
    buffers: tuple[Tensor, ...]  # what the graph reads and writes, kept as long as it


class FusedStep(Step):
    def __init__(self, model: Transformer, pages: Pages, *, graphs: bool = True) -> None:
        super().__init__(model, pages)
        config = model.config
        self.graphs = self.works_alone = graphs and self.device.type == "cuda"
        self._group = config.heads // config.kv_heads
        longest = min(config.max_positions, pages.count * PAGE)
        self.table = torch.zeros(_SLOTS, pages_for(longest), dtype=torch.int32, device=self.device)
        self.carry = self.carry.new_zeros(_SLOTS, config.hidden_size)
        cos, sin = rope(torch.arange(longest, device=self.device), config, self.dtype)
        self._cos, self._sin = cos[:, 0].contiguous(), sin[:, 0].contiguous()
        self._products = products_on(self.device)
        self._room = 0  # tokens that may be staged
        self._staged_keys = pages.keys[:, :0]
        self._staged_values = pages.values[:, :0]
        self._hidden_rows = self.carry[:0]
        self._captured: dict[Sizes, _Captured] = {}
        self._begun: tuple[_Captured, Batch, Sequence[DecodeConfig]] | None = None
        self._forget()

    def open(self, slot: int, pages: Sequence[int]) -> None:
        if slot >= len(self.table):
            self.table = torch.cat([self.table, torch.zeros_like(self.table)])
            self.carry = torch.cat([self.carry, torch.zeros_like(self.carry)])
            self._forget()
            self.open(slot, pages)
            return
        self.table[slot, : len(pages)] = torch.tensor(pages, dtype=torch.int32, device=self.device)

    # -- a round ------------------------------------------------------------------------------

    def forward(
        self, batch: Batch, tables: Sequence[IntArray], configs: Sequence[DecodeConfig]
    ) -> Found:
        if self.graphs:
            self.begin(batch, tables, configs)
            return self.finish()
        sizes = self._sizes(batch, configs)
        self._make_room(sizes.tokens)
        buffer = torch.zeros(_buffer_size(sizes), dtype=torch.int32)
        self._fill(_Arrays.of(_cut(buffer, sizes)), batch, configs, sizes)
        out = self._body(_cut(buffer.to(self.device), sizes), sizes).cpu().numpy()
        return self._found(out, batch, configs)

    def begin(
        self, batch: Batch, tables: Sequence[IntArray], configs: Sequence[DecodeConfig]
    ) -> None:
        self._wait()
        sizes = self._sizes(batch, configs)
        self._make_room(sizes.tokens)
        captured = self._captured.pop(sizes, None) or self._capture(sizes)
        self._captured[sizes] = captured  # the last used is the last to go
        self._fill(captured.arrays, batch, configs, sizes)
        if self.timed:
            self._clock[0].record()
        captured.graph.replay()
        if self.timed:
            self._clock[1].record()
        self._begun = captured, batch, configs

    def finish(self) -> Found:
        assert self._begun is not None
        captured, batch, configs = self._begun
        self._wait()
        if self.timed:
            self.forward_seconds = self._clock[0].elapsed_time(self._clock[1]) / 1e3
        return self._found(captured.out, batch, configs)

    def _wait(self) -> None:
        """Until the device is done with the buffers of what was begun, wanted or not."""
        if self._begun is not None:
            torch.cuda.current_stream(self.device).synchronize()
            self._begun = None

    def _found(self, out: IntArray, batch: Batch, configs: Sequence[DecodeConfig]) -> Found:
        """out: [3, N] int32."""
        self._hidden = self._hidden_rows
        if not all(map(_fuses, configs)):
            return self.statistics(batch, self._hidden, configs)
        found = out[:, : len(batch.wanted_from)]
        return found[0].astype(np.int64), found[1].view(np.float32), found[2].view(np.float32)

    @cached_property
    def _clock(self) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        began, ended = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        return began, ended

    def commit(self, source: IntArray, place: IntArray, carries: Sequence[tuple[int, int]]) -> None:
        moves = torch.from_numpy(np.stack([source, place]).astype(np.int32)).to(self.device)
        keys, values = self._staged_keys, self._staged_values
        settle(keys, values, self.pages.keys, self.pages.values, moves)
        for token, slot in carries:
            self.carry[slot] = self._hidden_rows[token]

    def staged(self, begin: int, count: int) -> Tensor:
        here = slice(begin, begin + count)
        parts = self._staged_keys[:, here], self._staged_values[:, here]
        return torch.cat([*(x.flatten() for x in parts), self._hidden_rows[here.stop - 1]])

    # -- sizes --------------------------------------------------------------------------------

    def _sizes(self, batch: Batch, configs: Sequence[DecodeConfig]) -> Sizes:
        fused = all(map(_fuses, configs))  # else statistics are made outside
        wanted = len(batch.wanted_from) if fused else 0
        drawing = fused and any(config.temperature > 0 for config in configs)
        return self._rounded(batch.size, len(batch.row_begin), wanted, drawing)

    def _rounded(self, tokens: int, rows: int, wanted: int, drawing: bool) -> Sizes:
        return _rounded(tokens, rows, wanted, drawing, self._group)

    def warm_up(self, tokens: int) -> None:
        """Capture what batches of up to so many tokens in up to 16 rows take, nothing drawn."""
        if not self.graphs:
            return
        self._make_room(_round_up(tokens))
        for sizes in self._common_sizes(tokens):
            if sizes not in self._captured:
                self._captured[sizes] = self._capture(sizes)

    def _common_sizes(self, tokens: int) -> list[Sizes]:
        """The largest first, so that the others find their memory."""
        found = {
            self._rounded(size, 1, wanted, False)
            for size in range(1, tokens + 1)
            for wanted in (1, size)
        }
        return sorted(found, key=lambda sizes: (sizes.tokens, sizes.wanted), reverse=True)

    def _make_room(self, tokens: int) -> None:
        """Staging for so many tokens."""
        if tokens > self._room:
            self._grow(max(tokens, 2 * self._room))

    @torch.inference_mode()
    def _grow(self, tokens: int) -> None:
        """What was captured on the smaller one is captured again."""
        config = self.model.config
        shape = (config.layers, tokens, config.kv_heads, config.head_dim)
        self._staged_keys = torch.empty(shape, dtype=self.dtype, device=self.device)
        self._staged_values = torch.empty_like(self._staged_keys)
        self._hidden_rows = self.carry.new_empty(tokens, config.hidden_size)
        self._room = tokens
        self._forget()

    def _forget(self) -> None:
        """Graphs that were captured on buffers that are gone. Their memory goes with them."""
        self._wait()
        self._captured.clear()
        self._memory = torch.cuda.graph_pool_handle() if self.graphs else None

    @torch.inference_mode()
    def _capture(self, sizes: Sizes) -> _Captured:
        if len(self._captured) >= _MOST_GRAPHS:
            self._captured.pop(next(iter(self._captured)))
        on_host = torch.zeros(_buffer_size(sizes), dtype=torch.int32, pin_memory=True)
        arrays = _Arrays.of(_cut(on_host, sizes))
        arrays.tile_row[:] = -1
        on_device = on_host.to(self.device)
        inputs = _cut(on_device, sizes)
        for _ in range(2):  # kernels are compiled, libraries choose theirs
            out = self._body(inputs, sizes)
        out_host = torch.zeros(out.shape, dtype=torch.int32, pin_memory=True)
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            on_device.copy_(on_host, non_blocking=True)
            out = self._body(inputs, sizes)
            out_host.copy_(out, non_blocking=True)
        return _Captured(graph, arrays, out_host.numpy(), (on_host, on_device, out, out_host))

    # -- the host's side ----------------------------------------------------------------------

    def _fill(
        self, to: _Arrays, batch: Batch, configs: Sequence[DecodeConfig], sizes: Sizes
    ) -> None:
        """The batch in one buffer of integers.

        Behind what is put there, an earlier batch may be left: only tiles and settings that are not
        in use have to say so.
        """
        tokens, rows, count = batch.size, len(batch.row_begin), len(batch.wanted_from)
        to.tokens[:tokens] = batch.tokens
        to.positions[:tokens] = batch.positions
        to.blocks[:tokens] = batch.blocks
        to.begin[:rows] = batch.row_begin
        to.length[:rows] = batch.row_length
        to.start[:rows] = batch.row_start
        to.cached[:rows] = batch.row_cached
        to.slot[:rows] = batch.row_slot
        row, at = _tiles(batch.row_length.tobytes(), self._group)
        to.tile_row[: len(row)] = row
        to.tile_row[len(row) :] = -1
        to.tile_at[: len(row)] = at
        if not sizes.wanted:
            return
        to.wanted_from[:count] = batch.wanted_from
        to.settings[:count, 0] = batch.wanted_position
        to.settings[count:, 3] = -1
        end = 0
        for (_, plan), config, wanted in zip(
            batch.plans, configs, batch.wanted_counts, strict=True
        ):
            here = slice(end, end := end + wanted)
            to.settings[here, 1:] = plan.index, config.seed, RANKINGS[config.ranking]
            to.temperature[here] = config.temperature

    # -- the device's side --------------------------------------------------------------------

    def _body(self, inputs: _Inputs, sizes: Sizes) -> Tensor:
        keys = self._staged_keys[:, : sizes.tokens]
        values = self._staged_values[:, : sizes.tokens]

        def place(layer: int) -> tuple[Tensor, Tensor]:
            return keys[layer], values[layer]

        rows = inputs.rows._replace(table=self.table)
        *_, hidden = self._fused_layers(inputs.tokens, inputs.positions, rows, place)
        self._hidden_rows[: sizes.tokens] = hidden
        out = torch.empty(3, sizes.wanted, dtype=torch.int32, device=self.device)
        if sizes.wanted:
            wanted = gather(self._hidden_rows, self.carry, inputs.wanted_from)
            mask = self.model.config.mask_id
            logits = self._products(wanted, self.model.head_weight)
            heat = inputs.temperature
            confidence(logits, inputs.settings, heat, mask, out, drawing=sizes.drawing)
        return out

    def _layers(
        self,
        batch: Batch,
        tables: Sequence[IntArray],
        keep: Callable[[int, Tensor, Tensor], None],
    ) -> Iterator[Tensor]:
        """For a long prompt: no graph, no staging, one layer at a time."""
        config = self.model.config
        sizes = self._rounded(batch.size, len(batch.row_begin), 0, False)
        buffer = torch.zeros(_buffer_size(sizes), dtype=torch.int32)
        self._fill(_Arrays.of(_cut(buffer, sizes)), batch, [], sizes)
        inputs = _cut(buffer.to(self.device), sizes)
        shape = (sizes.tokens, config.kv_heads, config.head_dim)
        keys, values = torch.empty(2, *shape, dtype=self.dtype, device=self.device)
        rows = inputs.rows._replace(table=self.table)
        stream = self._fused_layers(
            inputs.tokens, inputs.positions, rows, lambda layer: (keys, values)
        )
        for layer in range(config.layers):
            x = next(stream)
            keep(layer, keys, values)
            yield x
        yield next(stream)

    def _fused_layers(
        self,
        tokens: Tensor,
        positions: Tensor,
        rows: Rows,
        place: Callable[[int], tuple[Tensor, Tensor]],
    ) -> Iterator[Tensor]:
        """The residual stream after each layer, and at last the normed hidden states."""
        config = self.model.config
        count = len(tokens)
        heads, dim = config.heads, config.head_dim
        programs = max(1, count * heads // TILE)
        splits = max(1, min(_MOST_SPLITS, _PROGRAMS // programs))
        cos, sin = self._cos[positions], self._sin[positions]
        x = self.model.embedding(tokens)
        layers: list[Layer] = list(self.model.layers)  # type: ignore[arg-type]
        h = _normed(x, None, layers[0].attention_norm, layers[0].attention.qkv)
        for index, layer in enumerate(layers):
            attention, feed_forward = layer.attention, layer.feed_forward
            qkv = self._product(attention.qkv, h)
            keys, values = place(index)
            weights = None
            if config.qk_norm:
                weights = attention.q_norm.weight, attention.k_norm.weight
            pointwise.rotate(qkv, cos, sin, weights, config.norm_eps, keys, values, heads)
            mixed = attend(
                qkv.view(count, -1, dim)[:, :heads],
                keys,
                values,
                self.pages.keys[index],
                self.pages.values[index],
                rows,
                splits=splits,
            ).view(count, heads * dim)
            kind = _kind(attention.out)
            given = pointwise.quantise(mixed, kind) if kind else mixed
            out = self._product(attention.out, given)
            h = _normed(x, out, layer.feed_forward_norm, feed_forward.gate_up)
            gate_up = self._product(feed_forward.gate_up, h)
            active = pointwise.activate(gate_up, _kind(feed_forward.down))
            out = self._product(feed_forward.down, active)
            if index + 1 < len(layers):
                following = layers[index + 1]
                h = _normed(x, out, following.attention_norm, following.attention.qkv)
            else:
                h = _normed(x, out, self.model.norm, None)
            yield x
        assert isinstance(h, Tensor)
        yield h

    def _product(self, linear: torch.nn.Module, x: Tensor | Scaled) -> Tensor:
        if isinstance(x, Scaled):
            out: Tensor = linear(x)
            return out
        return self._products(x, linear.weight, linear.bias)  # type: ignore[arg-type]


def _normed(x: Tensor, delta: Tensor | None, norm: torch.nn.Module, to: object) -> Tensor | Scaled:
    return pointwise.norm(x, delta, norm.weight, norm.eps, _kind(to))  # type: ignore[arg-type]


def _kind(linear: object) -> torch.dtype | None:
    return linear.kind if isinstance(linear, QuantizedLinear) else None


def _fuses(config: DecodeConfig) -> bool:
    """What the confidence kernel does not do goes through `lopa.engine.statistics`."""
    return config.top_p == 1.0 and config.top_k == 0 and config.decoder != "fast-dllm"


@lru_cache(maxsize=1024)
def _rounded(tokens: int, rows: int, wanted: int, drawing: bool, group: int) -> Sizes:
    tokens = _round_up(tokens)
    rows = next(size for size in (16, 64, 256, tokens + 256) if rows <= size)
    if wanted:
        half = _round_up(tokens // 2)
        wanted = half if wanted <= half else tokens
    return Sizes(tokens, rows, most_tiles(tokens, rows, group), wanted, drawing)


@lru_cache(maxsize=256)
def _tiles(row_lengths: bytes, group: int) -> tuple[IntArray, IntArray]:
    """The row of each tile of attention, and its first folded query."""
    tiles = -(-np.frombuffer(row_lengths, np.int64) * group // TILE)  # [R]
    row = np.repeat(np.arange(len(tiles)), tiles)
    first = np.cumsum(tiles) - tiles
    return row, (np.arange(len(row)) - first[row]) * TILE


def _round_up(tokens: int) -> int:
    step = 32 if tokens <= 256 else 64 if tokens <= 1024 else 256
    return max(32, -(-tokens // step) * step)


def _lengths(sizes: Sizes) -> list[int]:
    """int64 settings first, so that they are aligned."""
    tokens, rows, tiles, wanted = sizes.tokens, sizes.rows, sizes.tiles, sizes.wanted
    return [8 * wanted, *[tokens] * 3, *[tiles] * 2, *[rows] * 5, *[wanted] * 2]


def _buffer_size(sizes: Sizes) -> int:
    return sum(_lengths(sizes))


def _cut(buffer: Tensor, sizes: Sizes) -> _Inputs:
    parts = torch.split(buffer, _lengths(sizes))
    settings, tokens, positions, blocks, tile_row, tile_at = parts[:6]
    begin, length, start, cached, slot, wanted_from, temperature = parts[6:]
    return _Inputs(
        tokens=tokens,
        positions=positions,
        rows=Rows(tile_row, tile_at, begin, length, start, cached, slot, blocks, buffer[:0]),
        wanted_from=wanted_from,
        temperature=temperature.view(torch.float32),
        settings=settings.view(torch.int64).view(-1, 4),
    )
