"""The table of cuBLASLt algorithms: its entries, when it is used, and that torch does the rest."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lopa.kernels.cublaslt import (
    Algorithm,
    CublasLtTable,
    Shape,
    algorithms_of,
    all_entries,
    cublaslt_table,
)

SHAPE = Shape(3, 5, 4, True)
ALGORITHM: Algorithm = (1, 2, 3, 4, 5, 6, 7, 8)


class FakeLibrary:
    """Records the algorithms that it is called with."""

    def __init__(self, able: bool) -> None:
        self.able = able
        self.called: list[Algorithm] = []

    def supports(self, shape: Shape, algorithm: Algorithm) -> bool:
        return self.able

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, how: Algorithm) -> Tensor:
        assert x.is_contiguous()
        self.called.append(how)
        return F.linear(x, weight, bias)


def operands(tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(tokens)
    return tuple(torch.randn(s).to(dtype) for s in ((tokens, 4), (5, 4), (5,)))  # type: ignore[return-value]


def test_the_table_is_for_its_shapes_and_bf16_alone() -> None:
    library: Any = FakeLibrary(able=True)
    table = CublasLtTable({SHAPE: ALGORITHM}, library)
    x, weight, bias = operands(3, torch.bfloat16)
    assert torch.equal(table(x, weight, bias), F.linear(x, weight, bias))
    assert library.called == [ALGORITHM]
    torch.testing.assert_close(
        table(x.t().contiguous().t(), weight, bias), F.linear(x, weight, bias)
    )
    assert len(library.called) == 2
    table(x, weight)  # no bias
    table(x[:2], weight, bias)
    table(*operands(3, torch.float32))
    assert len(library.called) == 2


def test_unsupported_algorithms_are_left_to_torch() -> None:
    library: Any = FakeLibrary(able=False)
    table = CublasLtTable({SHAPE: ALGORITHM}, library)
    assert table.algorithms == {}
    x, weight, bias = operands(3, torch.bfloat16)
    assert torch.equal(table(x, weight, bias), F.linear(x, weight, bias))
    assert library.called == []


def test_another_device_or_version_has_no_table() -> None:
    algorithms = [{"shape": list(SHAPE), "algorithm": list(ALGORITHM)}]
    entries = [{"device": "A", "version": 1, "algorithms": algorithms}]
    assert algorithms_of(entries, "A", 1) == {SHAPE: ALGORITHM}
    assert algorithms_of(entries, "A", 2) == algorithms_of(entries, "B", 1) == {}
    assert cublaslt_table(torch.device("cpu")).algorithms == {}


@pytest.mark.parametrize("entry", all_entries())
def test_the_file_of_the_package(entry: dict[str, Any]) -> None:
    shapes = [tuple(line["shape"]) for line in entry["algorithms"]]
    assert len(set(shapes)) == len(shapes)
    for line in entry["algorithms"]:
        assert len(line["algorithm"]) == 8
        assert all(0 <= part < 2**64 for part in line["algorithm"])
        assert line["us"] < line["torch_us"]  # else it is not worth an entry
