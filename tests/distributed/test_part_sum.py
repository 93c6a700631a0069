"""Sums between pieces of a graph that records the operations of torch instead of a device's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lopa.distributed.mesh import Mesh
from lopa.distributed.part_sum import PartSum
from lopa.runner.graph_pieces import GraphPieces, on_host


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out


class RecordedGraph:
    """A replay does the operations again, on the same tensors."""

    options: ClassVar[list[Any]] = []  # of all graphs

    def capture_begin(self, *given: Any, **options: Any) -> None:
        self.options.append((given, options))
        self.operations = Operations()
        self.operations.__enter__()

    def capture_end(self) -> None:
        self.operations.__exit__(None, None, None)

    def replay(self) -> None:
        for func, args, kwargs, out in self.operations.calls:
            again = func(*args, **kwargs)
            if again is not out:
                out.copy_(again)


class OtherPart(Mesh):
    """The other rank of a replica always has 100."""

    sums = 0

    def sum_over_parts(self, values: Tensor) -> Tensor:
        self.sums += 1
        return values.add_(100)


class OnePart(PartSum):
    """As where ranks share a GPU."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh)
        self._crosses_host = True

    def _buffer(self, values: Tensor) -> Tensor:
        return self._buffers.setdefault(values.numel(), torch.empty_like(values))


@pytest.fixture(autouse=True)
def _no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", RecordedGraph)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    monkeypatch.setattr(RecordedGraph, "options", [])


def test_a_graph_is_cut_where_the_host_sums() -> None:
    mesh = OtherPart(0, 1, 2, torch.device("cpu"))
    sum_parts = OnePart(mesh)
    x, out = torch.tensor([1.0, 2.0]), torch.zeros(2)

    def work() -> None:
        first = sum_parts(x * 2)
        out.copy_(sum_parts(first + 1) * x)

    work()
    assert out.tolist() == [203, 410]  # by hand: (2x + 100 + 1 + 100) · x
    assert mesh.sums == 2
    pieces = GraphPieces()
    pieces.capture_begin("pool", capture_error_mode="global")
    work()
    pieces.capture_end()
    assert len(pieces) == 3
    assert RecordedGraph.options == [(("pool",), {"capture_error_mode": "global"})] * 3
    assert mesh.sums == 2  # none while it is captured
    for value in (5.0, -3.0):
        x.fill_(value)
        pieces.replay()
        assert out.tolist() == [(2 * value + 201) * value] * 2
    assert mesh.sums == 6


def test_one_piece_where_the_host_has_no_part() -> None:
    x, out, steps = torch.ones(2), torch.zeros(2), []
    pieces = GraphPieces()
    pieces.capture_begin()
    out.copy_(x + 1)
    pieces.capture_end()
    on_host(lambda: steps.append(1))
    x.fill_(7)
    pieces.replay()
    assert (len(pieces), out.tolist(), steps) == (1, [8, 8], [1])
