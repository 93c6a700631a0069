"""The backend of fused kernels and CUDA graphs, for NVIDIA GPUs.

A forward is two graphs of the layers and one of the head, each cached by its own sizes. The layers:
a copy of their inputs to the device, the KV writes that the last round committed, and the layers
themselves. The head: a copy of its inputs, the logits, their statistics, and a small copy back. The
first layer has a graph of its own, since a long graph takes the host a while to launch. The head's
inputs are filled while the device runs the layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

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
from lopa.runner.backend_torch import Found, InFlight, TorchBackend
from lopa.runner.batch import Batch
from lopa.runner.graph_inputs import HeadInputs, HeadSizes, HostLayerInputs, LayerInputs
from lopa.runner.graphs import GraphCache, HeadGraph, common_sizes
from lopa.runner.kv_cache import PAGE, KVCache, pages_for
from lopa.types import IntArray

_SLOTS = 256  # at first


class TritonBackend(TorchBackend):
    def __init__(self, model: Transformer, kv_cache: KVCache, *, graphs: bool = True) -> None:
        super().__init__(model, kv_cache)
        config = model.config
        on_gpu = self.device.type == "cuda"
        self._graphs = GraphCache(self.device) if graphs and on_gpu else None
        self.is_async = self._graphs is not None
        self._group = config.heads // config.kv_heads
        longest = min(config.max_positions, kv_cache.total_pages * PAGE)
        self.table = torch.zeros(_SLOTS, pages_for(longest), dtype=torch.int32, device=self.device)
        self.carry = self.carry.new_zeros(_SLOTS, config.hidden_size)
        cos, sin = rope(torch.arange(longest, device=self.device), config, self.dtype)
        self._cos, self._sin = cos[:, 0].contiguous(), sin[:, 0].contiguous()
        self._table = cublaslt_table(self.device)
        self._staged = Staged(kv_cache.keys[:, :0], kv_cache.values[:, :0], self.carry[:0])
        self._launches = 0
        self._pending: PendingKVWrites[IntArray] | None = None  # written by the next graph

    def open(self, slot: int, pages: Sequence[int]) -> None:
        self.flush()  # pending writes may be for a former owner of this slot or its pages
        if slot >= len(self.table):
            table, carry = (torch.cat([x, torch.zeros_like(x)]) for x in (self.table, self.carry))
            self.table, self.carry = table, carry
            self._drop_graphs()
            self.open(slot, pages)
            return
        self.table[slot, : len(pages)] = torch.tensor(pages, dtype=torch.int32, device=self.device)

    # -- a round ------------------------------------------------------------------------------

    def launch(
        self, batch: Batch, tables: Sequence[IntArray], configs: Sequence[DecodeConfig]
    ) -> InFlight:
        if self._graphs is None:
            found = self._run(batch, configs)
            return InFlight(lambda: found)
        self._launches += 1
        head = self._replay(self._graphs, batch, configs)
        return InFlight(partial(self._wait, self._launches, head, batch, configs))

    def _run(self, batch: Batch, configs: Sequence[DecodeConfig]) -> Found:
        """Without graphs."""
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

    def _replay(
        self, graphs: GraphCache, batch: Batch, configs: Sequence[DecodeConfig]
    ) -> HeadGraph | None:
        """Launch the layers, then the head; None where it is left to `_wait`."""
        graphs.wait()  # for the last forward: its buffers are filled again
        sizes = graph_inputs.layer_sizes(batch, self._group)
        if sizes not in graphs.layers:
            self._ensure_staging(sizes.tokens)
            self.flush()  # the trial run before a capture overwrites what is staged
        layers = graphs.layer_graph(sizes, self._write_and_run_layers)
        layers.inputs.fill(batch, self._pending, self._group)
        self._pending = None
        if self.timer is not None:
            self.timer.start()
        graphs.replay(layers)
        head = None
        if (head_sizes := _head_sizes(batch, configs)) is not None:
            head = graphs.head_graph(head_sizes, self._run_head)
            graph_inputs.fill_head(head.inputs, batch, configs)
            graphs.replay(head)
        if self.timer is not None:
            self.timer.stop()
        return head

    def _wait(
        self,
        launch: int,
        head: HeadGraph | None,
        batch: Batch,
        configs: Sequence[DecodeConfig],
    ) -> Found:
        assert self._graphs is not None
        if launch != self._launches:
            raise RuntimeError("another forward was launched since")
        self._graphs.wait()
        return self._outside(batch, configs) if head is None else self._found(head.out, batch)

    def _outside(self, batch: Batch, configs: Sequence[DecodeConfig]) -> Found:
        """By plain torch, where the confidence kernel lacks a setting."""
        return self._find_statistics(batch, self._staged.hidden, configs)

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
        fits = len(source) <= graph_inputs.WRITES and len(carries) <= graph_inputs.CARRIES
        if self._graphs is None or not fits:
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
        write_kv(self._staged, self.kv_cache.keys, self.kv_cache.values, self.carry, writes)

    def staged(self, begin: int, count: int) -> Tensor:
        keys, values, hidden = self._staged
        here = slice(begin, begin + count)
        return torch.cat(
            [keys[:, here].flatten(), values[:, here].flatten(), hidden[here.stop - 1]]
        )

    # -- sizes --------------------------------------------------------------------------------

    def warm_up(self, tokens: int) -> None:
        """Capture the graphs of batches of up to so many tokens in 16 rows, without sampling."""
        if self._graphs is None:
            return
        self.flush()
        self._ensure_staging(graph_inputs.round_up(tokens))
        layers, heads = common_sizes(tokens, self._group)
        for sizes in layers:
            self._graphs.layer_graph(sizes, self._write_and_run_layers)
        for head in heads:
            self._graphs.head_graph(head, self._run_head)

    def _ensure_staging(self, tokens: int) -> None:
        """Staging for at least so many tokens."""
        capacity = len(self._staged.hidden)
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
        self._staged = Staged(keys, values, hidden)  # when memory runs out, the old one stays
        self._drop_graphs()

    def _drop_graphs(self) -> None:
        """They were captured on tensors that have been replaced."""
        if self._graphs is not None:
            self._graphs.clear()

    # -- on the device ------------------------------------------------------------------------

    def _eager_inputs(self, batch: Batch) -> LayerInputs[Tensor]:
        """The inputs of the layers, where there is no graph."""
        sizes = graph_inputs.layer_sizes(batch, self._group)
        on_host = graph_inputs.layer_buffer(sizes)
        HostLayerInputs(on_host, sizes).fill(batch, None, self._group)
        return graph_inputs.split_layers(on_host.to(self.device), sizes)

    def _write_and_run_layers(self, inputs: LayerInputs[Tensor]) -> Iterator[None]:
        self._write_kv(graph_inputs.pending_writes(inputs))
        yield from self._run_layers(inputs)

    def _run_layers(self, inputs: LayerInputs[Tensor]) -> Iterator[None]:
        """Yields after each layer. Keys and values are staged, at the end the hidden states."""
        count = len(inputs.tokens)
        keys, values = self._staged.keys[:, :count], self._staged.values[:, :count]

        def stage(layer: int) -> tuple[Tensor, Tensor]:
            return keys[layer], values[layer]

        rows = graph_inputs.attention_rows(inputs, self.table)
        layers = self._fused_layers(inputs.tokens, inputs.positions, rows, stage)
        for _ in range(self.model.config.layers):
            next(layers)
            yield
        self._staged.hidden[:count] = next(layers)

    def _run_head(self, inputs: HeadInputs[Tensor], sizes: HeadSizes) -> Tensor:
        """[3, N] int32: token, and the bits of max_prob and ranking."""
        out = torch.empty(3, sizes.wanted, dtype=torch.int32, device=self.device)
        wanted = gather(self._staged.hidden, self.carry, inputs.wanted_from)
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
