"""Quantized products against the same product in fp64."""

from __future__ import annotations

import pytest
import torch

from lopa.kernels.triton import matmul
from lopa.kernels.triton.matmul import Tiling, fitted, scaled_matmul, splits_for, tiling


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("rows", "columns", "inner"), [(3, 70, 100), (130, 64, 256)])
def test_int8(rows: int, columns: int, inner: int, bias: bool) -> None:
    torch.manual_seed(0)
    x = torch.randint(-127, 128, (rows, inner), dtype=torch.int8)
    w = torch.randint(-127, 128, (columns, inner), dtype=torch.int8)
    x_scale, w_scale = torch.rand(rows, 1), torch.rand(columns, 1)
    more = torch.randn(columns) if bias else None
    plain = (x.double() @ w.double().T) * x_scale * w_scale.T
    if more is not None:
        plain += more
    ours = scaled_matmul(x, x_scale, w, w_scale, more, torch.float32)
    torch.testing.assert_close(ours, plain.float(), rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("splits", [1, 2, 3, 9])
@pytest.mark.parametrize(("rows", "inner"), [(3, 1000), (3, 1024), (130, 1000)])
def test_splits_of_the_inner_axis(rows: int, inner: int, splits: int) -> None:
    """Twice, since the first leaves the counters for the second."""
    torch.manual_seed(splits)
    for _ in range(2):
        x = torch.randint(-127, 128, (rows, inner), dtype=torch.int8)
        w = torch.randint(-127, 128, (150, inner), dtype=torch.int8)
        ones = torch.ones(rows, 1), torch.ones(150, 1)
        ours = scaled_matmul(x, ones[0], w, ones[1], None, torch.float32, splits=splits)
        assert torch.equal(ours, (x.double() @ w.double().T).float())


@pytest.mark.parametrize(
    ("rows", "columns", "inner", "splits"),
    [
        (64, 3584, 18944, 2),  # 56 tiles
        (64, 37888, 3584, 1),  # 592
        (64, 64, 4096, 1),  # one, with a short inner axis
        (128, 3584, 18944, 4),  # 56
        (256, 3584, 18944, 2),  # 112
        (512, 3584, 18944, 1),  # 112 that are larger
    ],
)
def test_splits_fill_the_device(rows: int, columns: int, inner: int, splits: int) -> None:
    assert splits_for(rows, columns, inner, tiling(rows, columns)) == splits


@pytest.mark.parametrize("rows", [64, 256, 512])
@pytest.mark.parametrize("columns", [3584, 37888])
def test_stages_go_by_the_shared_memory(rows: int, columns: int) -> None:
    tile = tiling(rows, columns)
    assert fitted(tile, 226 * 1024) == tile  # an H200
    small = fitted(tile, 98 * 1024)  # a desktop GPU
    assert 2 <= small.stages < tile.stages or small == tile
    assert (tile.rows + tile.columns) * tile.inner * small.stages <= 98 * 1024


def test_refuses_to_split_too_many_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "_MOST_TILES", 2)
    x, w = torch.zeros(64, 32, dtype=torch.int8), torch.zeros(64 * 3, 32, dtype=torch.int8)
    scales = torch.ones(64, 1), torch.ones(64 * 3, 1)
    tile = Tiling(64, 64, 16, 4, 2)
    with pytest.raises(ValueError, match="3 tiles"):
        scaled_matmul(x, scales[0], w, scales[1], None, torch.float32, splits=2, tile=tile)
