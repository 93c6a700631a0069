"""Products by table: what is in it, who may use it, and that everything else goes torch's way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lopa.kernels.cublaslt import Algorithm, Products, Shape, known, products_on, table_of

SHAPE = Shape(3, 5, 4, True)
ALGORITHM: Algorithm = (1, 2, 3, 4, 5, 6, 7, 8)


class FakeLibrary:
    """Notes what it is asked for."""

    def __init__(self, able: bool) -> None:
        self.able = able
        self.asked: list[Algorithm] = []

    def can(self, shape: Shape, algorithm: Algorithm) -> bool:
        return self.able

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, how: Algorithm) -> Tensor:
        assert x.is_contiguous()
        self.asked.append(how)
        return F.linear(x, weight, bias)


def operands(tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(tokens)
    return tuple(torch.randn(s).to(dtype) for s in ((tokens, 4), (5, 4), (5,)))  # type: ignore[return-value]


def test_the_table_is_for_its_shapes_and_bf16_alone() -> None:
    library: Any = FakeLibrary(able=True)
    product = Products({SHAPE: ALGORITHM}, library)
    x, weight, bias = operands(3, torch.bfloat16)
    assert torch.equal(product(x, weight, bias), F.linear(x, weight, bias))
    assert library.asked == [ALGORITHM]
    torch.testing.assert_close(
        product(x.t().contiguous().t(), weight, bias), F.linear(x, weight, bias)
    )
    assert len(library.asked) == 2
    product(x, weight)  # no bias
    product(x[:2], weight, bias)
    product(*operands(3, torch.float32))
    assert len(library.asked) == 2


def test_what_the_library_cannot_do_is_left_to_torch() -> None:
    library: Any = FakeLibrary(able=False)
    product = Products({SHAPE: ALGORITHM}, library)
    assert product.table == {}
    x, weight, bias = operands(3, torch.bfloat16)
    assert torch.equal(product(x, weight, bias), F.linear(x, weight, bias))
    assert library.asked == []


def test_another_device_or_version_has_no_table() -> None:
    products = [{"shape": list(SHAPE), "algorithm": list(ALGORITHM)}]
    entries = [{"device": "A", "version": 1, "products": products}]
    assert table_of(entries, "A", 1) == {SHAPE: ALGORITHM}
    assert table_of(entries, "A", 2) == table_of(entries, "B", 1) == {}
    assert products_on(torch.device("cpu")).table == {}


@pytest.mark.parametrize("entry", known())
def test_the_table_in_the_package(entry: dict[str, Any]) -> None:
    shapes = [tuple(line["shape"]) for line in entry["products"]]
    assert len(set(shapes)) == len(shapes)
    for line in entry["products"]:
        assert len(line["algorithm"]) == 8
        assert all(0 <= part < 2**64 for part in line["algorithm"])
        assert line["us"] < line["torch_us"]  # or it would have no place there
