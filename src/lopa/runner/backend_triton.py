"""A step on fused kernels and CUDA graphs: what a round costs is the matrix products.

A round is the graphs of the layers and one of the head, each kept by its own sizes: a copy of
integers to the device, what the last round committed, and the layers; another such copy, the head
and a small copy back. The first layer has a graph to itself, since a long one takes the host a
while to start; the head's integers are laid out while the device is at the layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from lopa.config import DecodeConfig
from lopa.kernels.compressed_linear import PackedLinear
from lopa.kernels.cublaslt import products_on
from lopa.kernels.hopper.swiglu_gemm import paired, suits
from lopa.kernels.quantize import QuantizedLinear
from lopa.kernels.scaled import Scaled
from lopa.kernels.triton import pointwise
from lopa.kernels.triton.attention import Rows, attend
from lopa.kernels.triton.confidence import confidence
from lopa.kernels.triton.kv_write import Moves, Staged, gather, settle
from lopa.models.transformer import FeedForward, Layer, Transformer, rope
from lopa.runner import graph_inputs as layout
from lopa.runner.backend_torch import Found, Step
from lopa.runner.batch import Batch
from lopa.runner.graph_inputs import Body, BodyArrays, BodySizes, Head, HeadSizes
from lopa.runner.kv_cache import PAGE, Pages, pages_for
from lopa.types import IntArray

_MOST_GRAPHS = 96  # sizes of the layers, of two graphs each, and as many of the head
_SLOTS = 256  # to begin with
_FIRST_LAYERS = 1  # in the graph that is started first

_Sizes = TypeVar("_Sizes")
_Graph = TypeVar("_Graph")


@dataclass(slots=True)
class _BodyGraph:
    graphs: list[torch.cuda.CUDAGraph]  # to be replayed in turn
    inputs: BodyArrays  # parts of a pinned buffer, which a replay reads
    buffers: tuple[Tensor, ...]  # what the graph reads and writes, kept as long as it


@dataclass(slots=True)
class _HeadGraph:
    graphs: list[torch.cuda.CUDAGraph]
    arrays: Head[IntArray]
    out: IntArray  # [3, N] int32, pinned: token, and the bits of max_prob and ranking
    buffers: tuple[Tensor, ...]


class FusedStep(Step):
    def __init__(self, model: Transformer, pages: Pages, *, graphs: bool = True) -> None:
        super().__init__(model, pages)
        config = model.config
        self._on_gpu = self.device.type == "cuda"
        self.graphs = self.works_alone = graphs and self._on_gpu
        self._group = config.heads // config.kv_heads
        longest = min(config.max_positions, pages.count * PAGE)
        self.table = torch.zeros(_SLOTS, pages_for(longest), dtype=torch.int32, device=self.device)
        self.carry = self.carry.new_zeros(_SLOTS, config.hidden_size)
        cos, sin = rope(torch.arange(longest, device=self.device), config, self.dtype)
        self._cos, self._sin = cos[:, 0].contiguous(), sin[:, 0].contiguous()
        self._products = products_on(self.device)
        self._staged_keys = pages.keys[:, :0]
        self._staged_values = pages.values[:, :0]
        self._hidden_rows = self.carry[:0]
        self._bodies: dict[BodySizes, _BodyGraph] = {}
        self._heads: dict[HeadSizes, _HeadGraph] = {}
        self._begun: tuple[_HeadGraph | None, Batch, Sequence[DecodeConfig]] | None = None
        self._committed: Moves[IntArray] | None = None  # and not settled: the next graph does that
        self._forget()

    def open(self, slot: int, pages: Sequence[int]) -> None:
        self.settle()  # it may have been of the slot, or of pages, that are given out again
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
        inputs = self._laid_out(batch)
        self._make_room(len(inputs.tokens))
        for _ in self._body(inputs):
            pass
        head = _head_sizes(batch, configs)
        if head is None:
            return self._outside(batch, configs)
        on_host = layout.head_buffer(head)
        layout.fill_head(layout.head_arrays(on_host, head), batch, configs)
        out = self._head(layout.cut_head(on_host.to(self.device), head), head)
        return self._found(out.cpu().numpy(), batch)

    def begin(
        self, batch: Batch, tables: Sequence[IntArray], configs: Sequence[DecodeConfig]
    ) -> None:
        self._wait()
        sizes = layout.body_sizes(batch, self._group)
        if sizes not in self._bodies:
            self._make_room(sizes.tokens)
            self.settle()  # a trial run of what is captured would write over it
        body = _kept(self._bodies, sizes, self._capture_body)
        body.inputs.fill(batch, self._committed, self._group)
        self._committed = None
        if self.clock is not None:
            self.clock.begin()
        for graph in body.graphs:
            graph.replay()
        head = None
        if (head_sizes := _head_sizes(batch, configs)) is not None:
            head = _kept(self._heads, head_sizes, self._capture_head)
            layout.fill_head(head.arrays, batch, configs)
            for graph in head.graphs:
                graph.replay()
        if self.clock is not None:
            self.clock.end()
        self._begun = head, batch, configs

    def finish(self) -> Found:
        assert self._begun is not None
        head, batch, configs = self._begun
        self._wait()
        return self._outside(batch, configs) if head is None else self._found(head.out, batch)

    def _wait(self) -> None:
        """Until the device is done with the buffers of what was begun, wanted or not."""
        if self._begun is not None:
            torch.cuda.current_stream(self.device).synchronize()
            self._begun = None

    def _outside(self, batch: Batch, configs: Sequence[DecodeConfig]) -> Found:
        """What the confidence kernel does not do."""
        return self.statistics(batch, self._hidden_rows, configs)

    @staticmethod
    def _found(out: IntArray, batch: Batch) -> Found:
        """out: [3, N] int32."""
        found = out[:, : len(batch.wanted.source)]
        return found[0].astype(np.int64), found[1].view(np.float32), found[2].view(np.float32)

    def commit(self, source: IntArray, place: IntArray, carries: Sequence[tuple[int, int]]) -> None:
        """Where the next graph has room it does this, before its layers."""
        self.settle()
        carried, slots = np.array(carries, np.int64).reshape(-1, 2).T
        self._committed = Moves(source, place, carried, slots)
        if not self.graphs or len(source) > layout.MOVES or len(carries) > layout.CARRIES:
            self.settle()

    @torch.inference_mode()
    def settle(self) -> None:
        if self._committed is not None:
            # In whole sixteens, as in a graph, so that the kernel is compiled once.
            lengths = [max(1, -(-len(part) // 16)) * 16 for part in self._committed]
            numbers = torch.full((sum(lengths),), -1, dtype=torch.int32)
            for to, part in zip(torch.split(numbers, lengths), self._committed, strict=True):
                to[: len(part)] = torch.from_numpy(part)
            self._settle(Moves(*torch.split(numbers.to(self.device), lengths)))
            self._committed = None

    def _settle(self, moves: Moves[Tensor]) -> None:
        staged = Staged(self._staged_keys, self._staged_values, self._hidden_rows)
        settle(staged, self.pages.keys, self.pages.values, self.carry, moves)

    def staged(self, begin: int, count: int) -> Tensor:
        here = slice(begin, begin + count)
        parts = self._staged_keys[:, here], self._staged_values[:, here]
        return torch.cat([*(x.flatten() for x in parts), self._hidden_rows[here.stop - 1]])

    # -- sizes --------------------------------------------------------------------------------

    def warm_up(self, tokens: int) -> None:
        """Capture what batches of up to so many tokens in up to 16 rows take, nothing drawn."""
        if not self.graphs:
            return
        self.settle()
        self._make_room(layout.round_up(tokens))
        bodies, heads = self._common_sizes(tokens)
        for sizes in bodies:
            _kept(self._bodies, sizes, self._capture_body)
        for head in heads:
            _kept(self._heads, head, self._capture_head)

    def _common_sizes(self, tokens: int) -> tuple[list[BodySizes], list[HeadSizes]]:
        """The largest first, so that the others find their memory."""
        counts = sorted({layout.round_up(count) for count in range(1, tokens + 1)}, reverse=True)
        bodies = [layout.rounded_body(count, 1, self._group) for count in counts]
        wanted = {layout.rounded_head(count) for count in range(1, tokens + 1)}
        return bodies, [HeadSizes(count, False) for count in sorted(wanted, reverse=True)]

    def _make_room(self, tokens: int) -> None:
        """Staging for so many tokens."""
        room = len(self._hidden_rows)
        if tokens > room:
            self._grow(max(tokens, 2 * room))

    @torch.inference_mode()
    def _grow(self, tokens: int) -> None:
        """What was captured on the smaller one is captured again."""
        self.settle()
        config = self.model.config
        shape = (config.layers, tokens, config.kv_heads, config.head_dim)
        keys = torch.empty(shape, dtype=self.dtype, device=self.device)
        values, hidden = torch.empty_like(keys), self.carry.new_empty(tokens, config.hidden_size)
        # All of them, or with no memory left none: the graphs know the old ones.
        self._staged_keys, self._staged_values, self._hidden_rows = keys, values, hidden
        self._forget()

    def _forget(self) -> None:
        """Graphs that were captured on buffers that are gone. Their memory goes with them."""
        self._wait()
        self._bodies.clear()
        self._heads.clear()
        self._memory = torch.cuda.graph_pool_handle() if self._on_gpu else None

    @torch.inference_mode()
    def _capture_body(self, sizes: BodySizes) -> _BodyGraph:
        on_host = layout.body_buffer(sizes, pinned=self._on_gpu)
        on_device = on_host.to(self.device)
        inputs = layout.cut_body(on_device, sizes)

        def work() -> Iterator[None]:
            on_device.copy_(on_host, non_blocking=True)
            self._settle(layout.moves_of(inputs))
            for layers, _ in enumerate(self._body(inputs), 1):
                if layers == _FIRST_LAYERS:
                    yield

        arrays = BodyArrays(on_host, sizes)
        return _BodyGraph(self._capture(work), arrays, (on_host, on_device))

    @torch.inference_mode()
    def _capture_head(self, sizes: HeadSizes) -> _HeadGraph:
        on_host = layout.head_buffer(sizes, pinned=self._on_gpu)
        on_device = on_host.to(self.device)
        inputs = layout.cut_head(on_device, sizes)
        out = torch.zeros(3, sizes.wanted, dtype=torch.int32, pin_memory=self._on_gpu)

        def work() -> Iterator[None]:
            on_device.copy_(on_host, non_blocking=True)
            out.copy_(self._head(inputs, sizes), non_blocking=True)
            yield from ()

        arrays = layout.head_arrays(on_host, sizes)
        return _HeadGraph(self._capture(work), arrays, out.numpy(), (on_host, on_device, out))

    def _capture(self, work: Callable[[], Iterator[None]]) -> list[torch.cuda.CUDAGraph]:
        """A graph of each part, up to where it yields."""
        for _ in range(2):  # kernels are compiled, libraries choose theirs
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

    # -- the device's side --------------------------------------------------------------------

    def _laid_out(self, batch: Batch) -> Body[Tensor]:
        """What the layers read, where there is no graph."""
        sizes = layout.body_sizes(batch, self._group)
        on_host = layout.body_buffer(sizes)
        BodyArrays(on_host, sizes).fill(batch, None, self._group)
        return layout.cut_body(on_host.to(self.device), sizes)

    def _body(self, inputs: Body[Tensor]) -> Iterator[None]:
        """One layer after another: keys and values are staged, the hidden states kept for the head.

        They are there when it has come to its end.
        """
        count = len(inputs.tokens)
        keys, values = self._staged_keys[:, :count], self._staged_values[:, :count]

        def place(layer: int) -> tuple[Tensor, Tensor]:
            return keys[layer], values[layer]

        rows = layout.rows_of(inputs, self.table)
        layers = self._fused_layers(inputs.tokens, inputs.positions, rows, place)
        for _ in range(self.model.config.layers):
            next(layers)
            yield
        self._hidden_rows[:count] = next(layers)

    def _head(self, inputs: Head[Tensor], sizes: HeadSizes) -> Tensor:
        """[3, N] int32: token, and the bits of max_prob and ranking."""
        out = torch.empty(3, sizes.wanted, dtype=torch.int32, device=self.device)
        wanted = gather(self._hidden_rows, self.carry, inputs.wanted_from)
        confidence(
            self._logits(wanted),
            inputs.settings,
            inputs.temperature,
            self.model.config.mask_id,
            out,
            drawing=sizes.drawing,
        )
        return out

    def _logits(self, hidden: Tensor) -> Tensor:
        weight = self.model.head_weight
        if suits(hidden, weight, gated=False):
            return paired(hidden, weight, gated=False)
        if self.model.config.tied_head:
            return self._products(hidden, weight)
        return self._product(self.model.head, hidden)

    def _layers(
        self,
        batch: Batch,
        tables: Sequence[IntArray],
        keep: Callable[[int, Tensor, Tensor], None],
    ) -> Iterator[Tensor]:
        """For a long prompt: no graph, no staging, one layer at a time."""
        config = self.model.config
        inputs = self._laid_out(batch)
        shape = (len(inputs.tokens), config.kv_heads, config.head_dim)
        keys, values = torch.empty(2, *shape, dtype=self.dtype, device=self.device)
        rows = layout.rows_of(inputs, self.table)
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
            ).view(count, heads * dim)
            kind = _kind(attention.out)
            given = pointwise.quantise(mixed, kind) if kind else mixed
            out = self._product(attention.out, given)
            h = _normed(x, out, layer.feed_forward_norm, feed_forward.gate_up)
            out = self._product(feed_forward.down, self._activated(feed_forward, h))
            if index + 1 < len(layers):
                following = layers[index + 1]
                h = _normed(x, out, following.attention_norm, following.attention.qkv)
            else:
                h = _normed(x, out, self.model.norm, None)
            yield x
        assert isinstance(h, Tensor)
        yield h

    def _activated(self, feed_forward: FeedForward, h: Tensor | Scaled) -> Tensor | Scaled:
        kind, gate_up = _kind(feed_forward.down), feed_forward.gate_up
        if kind is None and isinstance(h, Tensor):
            if isinstance(gate_up, PackedLinear) and gate_up.packed.suits(h):
                return gate_up.packed(h)
            if suits(h, gate_up.weight, gated=True):
                return paired(h, gate_up.weight, gated=True)
        return pointwise.activate(self._product(gate_up, h), kind)

    def _product(self, linear: torch.nn.Module, x: Tensor | Scaled) -> Tensor:
        if isinstance(x, Scaled):
            out: Tensor = linear(x)
            return out
        if isinstance(linear, PackedLinear) and linear.packed.suits(x):
            return linear.packed(x)
        return self._products(x, linear.weight, linear.bias)  # type: ignore[arg-type]


def _normed(x: Tensor, delta: Tensor | None, norm: torch.nn.Module, to: object) -> Tensor | Scaled:
    return pointwise.norm(x, delta, norm.weight, norm.eps, _kind(to))  # type: ignore[arg-type]


def _kind(linear: object) -> torch.dtype | None:
    return linear.kind if isinstance(linear, QuantizedLinear) else None


def _head_sizes(batch: Batch, configs: Sequence[DecodeConfig]) -> HeadSizes | None:
    """None: what the confidence kernel does not do goes through `lopa.runner.statistics`."""
    if not all(map(_fuses, configs)) or not len(batch.wanted.source):
        return None
    return layout.head_sizes(batch, configs)


def _fuses(config: DecodeConfig) -> bool:
    return config.top_p == 1.0 and config.top_k == 0 and not config.needs_fp64


def _kept(
    graphs: dict[_Sizes, _Graph], sizes: _Sizes, capture: Callable[[_Sizes], _Graph]
) -> _Graph:
    """The graph of these sizes, captured if need be; the last used is the last to go."""
    graph = graphs.pop(sizes, None)
    if graph is None:
        if len(graphs) >= _MOST_GRAPHS:
            graphs.pop(next(iter(graphs)))
        graph = capture(sizes)
    graphs[sizes] = graph
    return graph
