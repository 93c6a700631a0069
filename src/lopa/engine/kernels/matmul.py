"""Quantised matrix products: x · wᵀ with one scale a token and one a column, fp8 or int8.

int8 is ours; fp8 uses torch's own where the device has it (`lopa.engine.quantize`), and this one in
the tests and for comparison.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _scaled(
    x,  # [M, K]
    w,  # [N, K]
    x_scale,  # [M]
    w_scale,  # [N]
    bias,  # [N]
    out,  # [M, N]
    M,
    N,
    K,
    HAS_BIAS: tl.constexpr,
    WHOLE: tl.constexpr,  # int8: sums are int32
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    # Programs that share columns of w follow one another, so that w is read from memory once.
    program = tl.program_id(0)
    rows, columns = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    per_group = GROUP * columns
    first = program // per_group * GROUP
    height = tl.minimum(rows - first, GROUP)
    m = (first + program % per_group % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = (program % per_group // height) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_at = x + (m % M).to(tl.int64)[:, None] * K + k[None, :]
    w_at = w + (n % N).to(tl.int64)[:, None] * K + k[None, :]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.int32 if WHOLE else tl.float32)
    for at in range(0, K, BLOCK_K):
        inside = (at + k < K)[None, :]
        a = tl.load(x_at + at, mask=inside, other=0.0)
        b = tl.load(w_at + at, mask=inside, other=0.0)
        if WHOLE:
            total = tl.dot(a, tl.trans(b), total, out_dtype=tl.int32)
        else:
            total = tl.dot(a, tl.trans(b), total)
    result = total.to(tl.float32)
    result = result * tl.load(x_scale + m % M)[:, None] * tl.load(w_scale + n % N)[None, :]
    if HAS_BIAS:
        result += tl.load(bias + n % N)[None, :].to(tl.float32)
    tl.store(
        out + m.to(tl.int64)[:, None] * N + n[None, :],
        result.to(out.dtype.element_ty),
        mask=(m < M)[:, None] & (n < N)[None, :],
    )


def scaled_matmul(
    x: Tensor,  # [M, K]
    x_scale: Tensor,  # [M, 1]
    w: Tensor,  # [N, K]
    w_scale: Tensor,  # [N, 1]
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    (rows, inner), columns = x.shape, w.shape[0]
    out = torch.empty(rows, columns, dtype=dtype, device=x.device)
    small = rows <= 64
    block_m = 64 if small else 128
    block_n = 64 if small else 128
    grid = (triton.cdiv(rows, block_m) * triton.cdiv(columns, block_n),)
    _scaled[grid](
        x,
        w,
        x_scale,
        w_scale,
        w_scale if bias is None else bias,
        out,
        rows,
        columns,
        inner,
        HAS_BIAS=bias is not None,
        WHOLE=x.dtype == torch.int8,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=128,
        GROUP=8,
        num_warps=4 if small else 8,
        num_stages=4 if small else 3,
    )
    return out
