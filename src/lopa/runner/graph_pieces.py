"""A CUDA graph in pieces, for work in which the host has a part.

What runs on the host cannot be captured. Where the captured work calls `on_host`, the graph is cut
in two; a replay runs the pieces in order, and the host's steps between them. Work without such a
call is one piece.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

_capturing = threading.local()  # .pieces: what this thread captures


class GraphPieces:
    """In place of a `torch.cuda.CUDAGraph`."""

    def __init__(self) -> None:
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._steps: list[Callable[[], None]] = []  # each after the graph of the same index
        self._options: tuple[tuple[Any, ...], dict[str, Any]] = (), {}

    def __len__(self) -> int:
        return len(self._graphs)

    def capture_begin(self, *given: Any, **options: Any) -> None:
        """As a CUDAGraph does; all pieces have these options, the memory pool among them."""
        self._options = given, options
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(*given, **options)
        self._graphs.append(graph)
        _capturing.pieces = self

    def capture_end(self) -> None:
        _capturing.pieces = None
        self._graphs[-1].capture_end()

    def cut(self, step: Callable[[], None]) -> None:
        """End a piece, begin the next; a replay runs the step between them."""
        given, options = self._options
        self.capture_end()
        self._steps.append(step)
        self.capture_begin(*given, **options)

    def replay(self) -> None:
        first, *others = self._graphs
        first.replay()
        for step, graph in zip(self._steps, others, strict=True):
            step()
            graph.replay()


def on_host(step: Callable[[], None]) -> None:
    """Run the step; if this thread captures a graph, in every replay at this place.

    A step waits by itself for the work that was queued before it.
    """
    pieces: GraphPieces | None = getattr(_capturing, "pieces", None)
    if pieces is None:
        step()
    else:
        pieces.cut(step)
