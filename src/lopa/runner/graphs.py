"""CUDA graphs of the layers and of the head, captured once per size and replayed.

A graph first copies its inputs from a pinned buffer on the host. To run another batch of the same
sizes, its buffer is filled and it is replayed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from lopa.runner import graph_inputs
from lopa.runner.graph_inputs import (
    ROWS,
    HeadInputs,
    HeadSizes,
    HostLayerInputs,
    LayerInputs,
    LayerSizes,
)
from lopa.runner.graph_pieces import GraphPieces
from lopa.types import IntArray

_USUAL_BLOCK = 32  # tokens: shorter rows are rare
_MOST_GRAPHS = 192  # sizes of the layers, and as many of the head

RunLayers = Callable[[LayerInputs[Tensor]], None]
RunHead = Callable[[HeadInputs[Tensor], HeadSizes], Tensor]  # → [3, N] int32

_Sizes = TypeVar("_Sizes")
_Graph = TypeVar("_Graph")


@dataclass(slots=True)
class LayerGraph:
    graph: GraphPieces
    inputs: HostLayerInputs
    buffers: tuple[Tensor, ...]  # what the graph reads and writes, kept as long as it is


@dataclass(slots=True)
class HeadGraph:
    graph: GraphPieces
    inputs: HeadInputs[IntArray]
    out: IntArray  # [3, N] int32, pinned: token, and the bits of max_prob and ranking
    buffers: tuple[Tensor, ...]


class GraphCache:
    """Graphs by size; the least recently used are dropped."""

    def __init__(self, device: torch.device, pool: Any = None) -> None:
        """pool: the memory of another's graphs, where the two never run at the same time."""
        self.device = device
        self._shared_pool = pool
        self.layers: dict[LayerSizes, LayerGraph] = {}
        self.heads: dict[HeadSizes, HeadGraph] = {}
        self._on_gpu = device.type == "cuda"
        self._is_busy = False
        # Of what was replayed last
        self._done = torch.cuda.Event() if self._on_gpu else None  # type: ignore[no-untyped-call]
        self.clear()

    def layer_graph(self, sizes: LayerSizes, run: RunLayers) -> LayerGraph:
        return _cached(self.layers, sizes, lambda: self._capture_layers(sizes, run))

    def head_graph(self, sizes: HeadSizes, run: RunHead) -> HeadGraph:
        return _cached(self.heads, sizes, lambda: self._capture_head(sizes, run))

    def replay(self, captured: LayerGraph | HeadGraph) -> None:
        self._is_busy = True
        captured.graph.replay()
        if self._done is not None:
            self._done.record(torch.cuda.current_stream(self.device))

    def run(self, work: Callable[[], None]) -> None:
        """Without a graph, behind what was replayed."""
        self._is_busy = True
        work()
        if self._done is not None:
            self._done.record(torch.cuda.current_stream(self.device))

    def wait(self) -> None:
        """Until the device has read and written the buffers of what was replayed."""
        if self._is_busy:
            assert self._done is not None
            self._done.synchronize()
            self._is_busy = False

    def clear(self) -> None:
        """Drop all graphs and their memory pool: tensors that they use have been replaced."""
        self.wait()
        self.layers.clear()
        self.heads.clear()
        self.pool = self._shared_pool
        if self._on_gpu and self.pool is None:
            self.pool = torch.cuda.graph_pool_handle()

    @torch.inference_mode()
    def _capture_layers(self, sizes: LayerSizes, run: RunLayers) -> LayerGraph:
        on_host = graph_inputs.layer_buffer(sizes, pinned=self._on_gpu)
        on_device = on_host.to(self.device)
        inputs = graph_inputs.split_layers(on_device, sizes)

        def work() -> None:
            on_device.copy_(on_host, non_blocking=True)
            run(inputs)

        graph = self._capture(work)
        return LayerGraph(graph, HostLayerInputs(on_host, sizes), (on_host, on_device))

    @torch.inference_mode()
    def _capture_head(self, sizes: HeadSizes, run: RunHead) -> HeadGraph:
        on_host = graph_inputs.head_buffer(sizes, pinned=self._on_gpu)
        on_device = on_host.to(self.device)
        inputs = graph_inputs.split_head(on_device, sizes)
        out = torch.zeros(3, sizes.wanted, dtype=torch.int32, pin_memory=self._on_gpu)

        def work() -> None:
            on_device.copy_(on_host, non_blocking=True)
            out.copy_(run(inputs, sizes), non_blocking=True)

        arrays = graph_inputs.head_arrays(on_host, sizes)
        return HeadGraph(self._capture(work), arrays, out.numpy(), (on_host, on_device, out))

    def _capture(self, work: Callable[[], None]) -> GraphPieces:
        for _ in range(2):  # trial runs, which compile kernels and load libraries
            work()
        torch.cuda.synchronize(self.device)
        graph = GraphPieces()
        with torch.cuda.graph(graph, pool=self.pool):  # type: ignore[arg-type]
            work()
        return graph


def common_sizes(
    tokens: int, group: int, *, most_rows: int = ROWS[0]
) -> tuple[list[LayerSizes], list[HeadSizes]]:
    """Of all batches of up to so many tokens in up to so many rows, without sampling.

    More than the fewest rows are of a block each or longer. The largest first, so that the others
    reuse its memory.
    """
    counts = range(tokens, 0, -1)
    fewest = [1, *(rows + 1 for rows in ROWS if rows < most_rows)]  # of each size of rows
    layers = {
        graph_inputs.round_layers(count, rows, group): None
        for count in counts
        for rows in fewest
        if rows == 1 or count >= rows * _USUAL_BLOCK
    }
    heads = {HeadSizes(graph_inputs.round_head(count), False): None for count in counts}
    return list(layers), list(heads)


def _cached(graphs: dict[_Sizes, _Graph], sizes: _Sizes, capture: Callable[[], _Graph]) -> _Graph:
    graph = graphs.pop(sizes, None)
    if graph is None:
        if len(graphs) >= _MOST_GRAPHS:
            graphs.pop(next(iter(graphs)))
        graph = capture()
    graphs[sizes] = graph  # the last used is the last key
    return graph
