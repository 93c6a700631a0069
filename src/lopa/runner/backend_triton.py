"""The backend of fused kernels and CUDA graphs, for NVIDIA GPUs.

A forward is two graphs of the layers and one of the head, each cached by its own sizes. The layers:
a copy of their inputs to the device, the KV writes that the last round committed, and the layers
themselves. The head: a copy of its inputs, the logits, their statistics, and a small copy back. The
first layer has a graph of its own, since a long graph takes the host a while to launch. The head's
inputs are filled while the device runs the layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from lopa.config import DecodeConfig
from lopa.kernels.compressed_linear import CompressedLinear
from lopa.kernels.cublaslt import cublaslt_table
from lopa.kernels.hopper.swiglu_gemm import supports, swiglu_gemm
from lopa.kernels.quantize import QuantizedLinear
from lopa.kernels.scaled import Scaled
from lopa.kernels.triton import pointwise
from lopa.kernels.triton.attention import Rows, attend
from lopa.kernels.triton.confidence import confidence
from lopa.kernels.triton.kv_write import PendingKVWrites, Staged, gather, write_kv
from lopa.models.transformer import FeedForward, Layer, Transformer, rope
from lopa.runner import graph_inputs
from lopa.runner.backend_torch import Found, TorchBackend
from lopa.runner.batch import Batch
from lopa.runner.graph_inputs import (
    HeadInputs,
    HeadSizes,
    HostLayerInputs,
    LayerInputs,
    LayerSizes,
)
from lopa.runner.kv_cache import PAGE, KVCache, pages_for
from lopa.types import IntArray

_MOST_GRAPHS = 96  # sizes of the layers, of two graphs each, and as many of the head
_SLOTS = 256  # to begin with
_FIRST_LAYERS = 1  # in the graph that is started first

_Sizes = TypeVar("_Sizes")
_Graph = TypeVar("_Graph")


@dataclass(slots=True)
class _LayerGraph:
    graphs: list[torch.cuda.CUDAGraph]  # to be replayed in turn
    inputs: HostLayerInputs  # in a pinned buffer, which a replay reads
    buffers: tuple[Tensor, ...]  # what the graph reads and writes, kept as long as it


@dataclass(slots=True)
class _HeadGraph:
    graphs: list[torch.cuda.CUDAGraph]
    inputs: HeadInputs[IntArray]
    out: IntArray  # [3, N] int32, pinned: token, and the bits of max_prob and ranking
    buffers: tuple[Tensor, ...]


class TritonBackend(TorchBackend):
    def __init__(self, model: Transformer, kv_cache: KVCache, *, graphs: bool = True) -> None:
        super().__init__(model, kv_cache)
        config = model.config
        self._on_gpu = self.device.type == "cuda"
        self.graphs = self.is_async = graphs and self._on_gpu
        self._group = config.heads // config.kv_heads
        longest = min(config.max_positions, kv_cache.total_pages * PAGE)
        self.table = torch.zeros(_SLOTS, pages_for(longest), dtype=torch.int32, device=self.device)
        self.carry = self.carry.new_zeros(_SLOTS, config.hidden_size)
        cos, sin = rope(torch.arange(longest, device=self.device), config, self.dtype)
        self._cos, self._sin = cos[:, 0].contiguous(), sin[:, 0].contiguous()
        self._table = cublaslt_table(self.device)
        self._staged_keys = kv_cache.keys[:, :0]
        self._staged_values = kv_cache.values[:, :0]
        self._hidden_rows = self.carry[:0]
        self._layer_graphs: dict[LayerSizes, _LayerGraph] = {}
        self._head_graphs: dict[HeadSizes, _HeadGraph] = {}
        self._begun: tuple[_HeadGraph | None, Batch, Sequence[DecodeConfig]] | None = None
        self._pending: PendingKVWrites[IntArray] | None = None  # written by the next graph
        self._forget()

    def open(self, slot: int, pages: Sequence[int]) -> None:
        self.flush()  # pending writes may be for a former owner of this slot or its pages
        if slot >= len(self.table):
            table, carry = (torch.cat([x, torch.zeros_like(x)]) for x in (self.table, self.carry))
            self.table, self.carry = table, carry
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
        inputs = self._eager_inputs(batch)
        self._ensure_staging(len(inputs.tokens))
        for _ in self._run_layers(inputs):
            pass
        head = _head_sizes(batch, configs)
        if head is None:
            return self._outside(batch, configs)
        on_host = graph_inputs.head_buffer(head)
        graph_inputs.fill_head(graph_inputs.head_arrays(on_host, head), batch, configs)
        out = self._run_head(graph_inputs.split_head(on_host.to(self.device), head), head)
        return self._found(out.cpu().numpy(), batch)

    def begin(
        self, batch: Batch, tables: Sequence[IntArray], configs: Sequence[DecodeConfig]
    ) -> None:
        self._wait()
        sizes = graph_inputs.layer_sizes(batch, self._group)
        if sizes not in self._layer_graphs:
            self._ensure_staging(sizes.tokens)
            self.flush()  # the trial run before a capture overwrites what is staged
        layers = _kept(self._layer_graphs, sizes, self._capture_layers)
        layers.inputs.fill(batch, self._pending, self._group)
        self._pending = None
        if self.timer is not None:
            self.timer.start()
        for graph in layers.graphs:
            graph.replay()
        head = None
        if (head_sizes := _head_sizes(batch, configs)) is not None:
            head = _kept(self._head_graphs, head_sizes, self._capture_head)
            graph_inputs.fill_head(head.inputs, batch, configs)
            for graph in head.graphs:
                graph.replay()
        if self.timer is not None:
            self.timer.stop()
        self._begun = head, batch, configs

    def finish(self) -> Found:
        assert self._begun is not None
        head, batch, configs = self._begun
        self._wait()
        return self._outside(batch, configs) if head is None else self._found(head.out, batch)

    def _wait(self) -> None:
        """Until the device is done with the buffers of the last forward."""
        if self._begun is not None:
            torch.cuda.current_stream(self.device).synchronize()
            self._begun = None

    def _outside(self, batch: Batch, configs: Sequence[DecodeConfig]) -> Found:
        """By plain torch, where the confidence kernel lacks a setting."""
        return self._find_statistics(batch, self._hidden_rows, configs)

    @staticmethod
    def _found(out: IntArray, batch: Batch) -> Found:
        """out: [3, N] int32."""
        found = out[:, : len(batch.wanted.source)]
        return found[0].astype(np.int64), found[1].view(np.float32), found[2].view(np.float32)

    def commit(
        self, source: IntArray, target: IntArray, carries: Sequence[tuple[int, int]]
    ) -> None:
        """Leave the writes to the next graph, which does them before its layers, if they fit."""
        self.flush()
        carry_source, carry_slot = np.array(carries, np.int64).reshape(-1, 2).T
        self._pending = PendingKVWrites(source, target, carry_source, carry_slot)
        if (
            not self.graphs
            or len(source) > graph_inputs.WRITES
            or len(carries) > graph_inputs.CARRIES
        ):
            self.flush()

    @torch.inference_mode()
    def flush(self) -> None:
        if self._pending is not None:
            # In multiples of 16, as in a graph: Triton compiles another kernel where they are not.
            lengths = [max(1, -(-len(part) // 16)) * 16 for part in self._pending]
            numbers = torch.full((sum(lengths),), -1, dtype=torch.int32)
            for to, part in zip(torch.split(numbers, lengths), self._pending, strict=True):
                to[: len(part)] = torch.from_numpy(part)
            self._write_kv(PendingKVWrites(*torch.split(numbers.to(self.device), lengths)))
            self._pending = None

    def _write_kv(self, writes: PendingKVWrites[Tensor]) -> None:
        staged = Staged(self._staged_keys, self._staged_values, self._hidden_rows)
        write_kv(staged, self.kv_cache.keys, self.kv_cache.values, self.carry, writes)

    def staged(self, begin: int, count: int) -> Tensor:
        here = slice(begin, begin + count)
        parts = self._staged_keys[:, here], self._staged_values[:, here]
        return torch.cat([*(x.flatten() for x in parts), self._hidden_rows[here.stop - 1]])

    # -- sizes --------------------------------------------------------------------------------

    def warm_up(self, tokens: int) -> None:
        """Capture the graphs of batches of up to so many tokens in 16 rows, without sampling."""
        if not self.graphs:
            return
        self.flush()
        self._ensure_staging(graph_inputs.round_up(tokens))
        all_layers, heads = self._common_sizes(tokens)
        for sizes in all_layers:
            _kept(self._layer_graphs, sizes, self._capture_layers)
        for head in heads:
            _kept(self._head_graphs, head, self._capture_head)

    def _common_sizes(self, tokens: int) -> tuple[list[LayerSizes], list[HeadSizes]]:
        """The largest first, so that the others reuse its memory."""
        counts = sorted(
            {graph_inputs.round_up(count) for count in range(1, tokens + 1)}, reverse=True
        )
        layers = [
            graph_inputs.round_layers(count, 1, self._group)
            for count in sorted(counts, reverse=True)
        ]
        wanted = {graph_inputs.round_head(count) for count in range(1, tokens + 1)}
        return layers, [HeadSizes(count, False) for count in sorted(wanted, reverse=True)]

    def _ensure_staging(self, tokens: int) -> None:
        """Staging for at least so many tokens."""
        capacity = len(self._hidden_rows)
        if tokens > capacity:
            self._grow(max(tokens, 2 * capacity))

    @torch.inference_mode()
    def _grow(self, tokens: int) -> None:
        """The graphs are dropped: they were captured on the smaller buffers."""
        self.flush()
        config = self.model.config
        shape = (config.layers, tokens, config.kv_heads, config.head_dim)
        keys = torch.empty(shape, dtype=self.dtype, device=self.device)
        values, hidden = torch.empty_like(keys), self.carry.new_empty(tokens, config.hidden_size)
        # All three or, when memory runs out, none: the graphs use the old ones.
        self._staged_keys, self._staged_values, self._hidden_rows = keys, values, hidden
        self._forget()

    def _forget(self) -> None:
        """Drop all graphs, and their memory pool."""
        self._wait()
        self._layer_graphs.clear()
        self._head_graphs.clear()
        self._memory = torch.cuda.graph_pool_handle() if self._on_gpu else None

    @torch.inference_mode()
    def _capture_layers(self, sizes: LayerSizes) -> _LayerGraph:
        on_host = graph_inputs.layer_buffer(sizes, pinned=self._on_gpu)
        on_device = on_host.to(self.device)
        inputs = graph_inputs.split_layers(on_device, sizes)

        def work() -> Iterator[None]:
            on_device.copy_(on_host, non_blocking=True)
            self._write_kv(graph_inputs.pending_writes(inputs))
            for done, _ in enumerate(self._run_layers(inputs), 1):
                if done == _FIRST_LAYERS:
                    yield

        arrays = HostLayerInputs(on_host, sizes)
        return _LayerGraph(self._capture(work), arrays, (on_host, on_device))

    @torch.inference_mode()
    def _capture_head(self, sizes: HeadSizes) -> _HeadGraph:
        on_host = graph_inputs.head_buffer(sizes, pinned=self._on_gpu)
        on_device = on_host.to(self.device)
        inputs = graph_inputs.split_head(on_device, sizes)
        out = torch.zeros(3, sizes.wanted, dtype=torch.int32, pin_memory=self._on_gpu)

        def work() -> Iterator[None]:
            on_device.copy_(on_host, non_blocking=True)
            out.copy_(self._run_head(inputs, sizes), non_blocking=True)
            yield from ()

        arrays = graph_inputs.head_arrays(on_host, sizes)
        return _HeadGraph(self._capture(work), arrays, out.numpy(), (on_host, on_device, out))

    def _capture(self, work: Callable[[], Iterator[None]]) -> list[torch.cuda.CUDAGraph]:
        """One graph up to each yield of the work, and one of the rest."""
        for _ in range(2):  # compiles the kernels
            for _ in work():
                pass
        torch.cuda.synchronize(self.device)
        graphs, parts = [], work()
        is_last = False
        while not is_last:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._memory):
                is_last = next(parts, "done") is not None
            graphs.append(graph)
        return graphs

    # -- on the device ------------------------------------------------------------------------

    def _eager_inputs(self, batch: Batch) -> LayerInputs[Tensor]:
        """The inputs of the layers, where there is no graph."""
        sizes = graph_inputs.layer_sizes(batch, self._group)
        on_host = graph_inputs.layer_buffer(sizes)
        HostLayerInputs(on_host, sizes).fill(batch, None, self._group)
        return graph_inputs.split_layers(on_host.to(self.device), sizes)

    def _run_layers(self, inputs: LayerInputs[Tensor]) -> Iterator[None]:
        """Yields after each layer. Keys and values are staged, at the end the hidden states."""
        count = len(inputs.tokens)
        keys, values = self._staged_keys[:, :count], self._staged_values[:, :count]

        def stage(layer: int) -> tuple[Tensor, Tensor]:
            return keys[layer], values[layer]

        rows = graph_inputs.attention_rows(inputs, self.table)
        layers = self._fused_layers(inputs.tokens, inputs.positions, rows, stage)
        for _ in range(self.model.config.layers):
            next(layers)
            yield
        self._hidden_rows[:count] = next(layers)

    def _run_head(self, inputs: HeadInputs[Tensor], sizes: HeadSizes) -> Tensor:
        """[3, N] int32: token, and the bits of max_prob and ranking."""
        out = torch.empty(3, sizes.wanted, dtype=torch.int32, device=self.device)
        wanted = gather(self._hidden_rows, self.carry, inputs.wanted_from)
        confidence(
            self._logits(wanted),
            inputs.settings,
            inputs.temperature,
            self.model.config.mask_id,
            out,
            sampling=sizes.sampling,
        )
        return out

    def _logits(self, hidden: Tensor) -> Tensor:
        weight = self.model.head_weight
        if supports(hidden, weight, gated=False):
            return swiglu_gemm(hidden, weight, gated=False)
        if self.model.config.tied_head:
            return self._table(hidden, weight)
        return self._linear(self.model.head, hidden)

    def _layers(
        self,
        batch: Batch,
        tables: Sequence[IntArray],
        keep: Callable[[int, Tensor, Tensor], None],
    ) -> Iterator[Tensor]:
        """For a long prompt: no graph, no staging, one layer at a time."""
        config = self.model.config
        inputs = self._eager_inputs(batch)
        shape = (len(inputs.tokens), config.kv_heads, config.head_dim)
        keys, values = torch.empty(2, *shape, dtype=self.dtype, device=self.device)
        rows = graph_inputs.attention_rows(inputs, self.table)
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
        stage: Callable[[int], tuple[Tensor, Tensor]],
    ) -> Iterator[Tensor]:
        """The residual stream after each layer, then the normed hidden states.

        stage: where the keys and values of a layer go.
        """
        config = self.model.config
        count = len(tokens)
        heads, dim = config.heads, config.head_dim
        cos, sin = self._cos[positions], self._sin[positions]
        x = self.model.embedding(tokens)
        layers: list[Layer] = list(self.model.layers)  # type: ignore[arg-type]
        h = _normed(x, None, layers[0].attention_norm, layers[0].attention.qkv)
        for index, layer in enumerate(layers):
            attention, feed_forward = layer.attention, layer.feed_forward
            qkv = self._linear(attention.qkv, h)
            keys, values = stage(index)
            weights = None
            if config.qk_norm:
                weights = attention.q_norm.weight, attention.k_norm.weight
            pointwise.rotate(qkv, cos, sin, weights, config.norm_eps, keys, values, heads)
            mixed = attend(
                qkv.view(count, -1, dim)[:, :heads],
                keys,
                values,
                self.kv_cache.keys[index],
                self.kv_cache.values[index],
                rows,
            ).view(count, heads * dim)
            kind = _kind(attention.out)
            given = pointwise.quantize_rows(mixed, kind) if kind else mixed
            out = self._linear(attention.out, given)
            h = _normed(x, out, layer.feed_forward_norm, feed_forward.gate_up)
            out = self._linear(feed_forward.down, self._swiglu(feed_forward, h))
            if index + 1 < len(layers):
                following = layers[index + 1]
                h = _normed(x, out, following.attention_norm, following.attention.qkv)
            else:
                h = _normed(x, out, self.model.norm, None)
            yield x
        assert isinstance(h, Tensor)
        yield h

    def _swiglu(self, feed_forward: FeedForward, h: Tensor | Scaled) -> Tensor | Scaled:
        kind, gate_up = _kind(feed_forward.down), feed_forward.gate_up
        if kind is None and isinstance(h, Tensor):
            if isinstance(gate_up, CompressedLinear) and gate_up.compressed.supports(h):
                return gate_up.compressed(h)
            if supports(h, gate_up.weight, gated=True):
                return swiglu_gemm(h, gate_up.weight, gated=True)
        return pointwise.activate(self._linear(gate_up, h), kind)

    def _linear(self, linear: torch.nn.Module, x: Tensor | Scaled) -> Tensor:
        if isinstance(x, Scaled):
            out: Tensor = linear(x)
            return out
        if isinstance(linear, CompressedLinear) and linear.compressed.supports(x):
            return linear.compressed(x)
        return self._table(x, linear.weight, linear.bias)  # type: ignore[arg-type]


def _normed(x: Tensor, delta: Tensor | None, norm: torch.nn.Module, to: object) -> Tensor | Scaled:
    return pointwise.norm(x, delta, norm.weight, norm.eps, _kind(to))  # type: ignore[arg-type]


def _kind(linear: object) -> torch.dtype | None:
    return linear.kind if isinstance(linear, QuantizedLinear) else None


def _head_sizes(batch: Batch, configs: Sequence[DecodeConfig]) -> HeadSizes | None:
    """None where the confidence kernel lacks a setting: `lopa.runner.statistics` has all."""
    if not all(map(_fuses, configs)) or not len(batch.wanted.source):
        return None
    return graph_inputs.head_sizes(batch, configs)


def _fuses(config: DecodeConfig) -> bool:
    return config.top_p == 1.0 and config.top_k == 0 and config.decoder != "fast-dllm"


def _kept(
    graphs: dict[_Sizes, _Graph], sizes: _Sizes, capture: Callable[[_Sizes], _Graph]
) -> _Graph:
    """The graph of these sizes, captured if there is none; the least recently used is dropped."""
    graph = graphs.pop(sizes, None)
    if graph is None:
        if len(graphs) >= _MOST_GRAPHS:
            graphs.pop(next(iter(graphs)))
        graph = capture(sizes)
    graphs[sizes] = graph
    return graph
