"""Quantised products against the same product in fp32."""

from __future__ import annotations

import pytest
import torch

from lopa.engine.kernels.matmul import scaled_matmul


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
