"""Heads turned to their positions (RoPE), and normed before where the model does that.

By a kernel of its own, once for all that read them, or by whoever reads them (`turned`).
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class Turn(NamedTuple):
    """What heads are rotated by, and what their norms take."""

    cos: Tensor  # [positions, D]
    sin: Tensor
    weights: tuple[Tensor, Tensor] | None  # of the norms of q and k, [D] each
    eps: float


@triton.jit
def turned(heads, at, live, position, cos, sin, weight, eps, D: tl.constexpr, NORMED: tl.constexpr):
    """The heads [N, D] at these offsets, normed and rotated to their positions [N]."""
    dims = tl.arange(0, D)
    pair = dims ^ (D // 2)  # the other coordinate of the rotation
    mask = live[:, None]
    own = tl.load(heads + at[:, None] + dims[None, :], mask=mask, other=0.0)
    other = tl.load(heads + at[:, None] + pair[None, :], mask=mask, other=0.0)
    if NORMED:
        wide = own.to(tl.float32)
        factor = tl.rsqrt(tl.sum(wide * wide, 1) / D + eps)[:, None]
        # Rounded to the model's type before the weight, as the plain norm does.
        wide = (wide * factor).to(own.dtype).to(tl.float32)
        own = (wide * tl.load(weight + dims)[None, :].to(tl.float32)).to(own.dtype)
        wide = (other.to(tl.float32) * factor).to(own.dtype).to(tl.float32)
        other = (wide * tl.load(weight + pair)[None, :].to(tl.float32)).to(own.dtype)
    angle = position.to(tl.int64)[:, None] * D + dims[None, :]
    c = tl.load(cos + angle, mask=mask, other=0.0).to(tl.float32)
    s = tl.load(sin + angle, mask=mask, other=0.0).to(tl.float32)
    s = tl.where((dims < D // 2)[None, :], -s, s)
    return (own.to(tl.float32) * c + other.to(tl.float32) * s).to(own.dtype)


@triton.jit
def _rotate(
    qkv,  # [T, (heads + 2 · kv_heads) · D], q is rotated in place
    positions,  # [T]
    cos,  # [positions, D]
    sin,
    q_weight,  # [D] where the model norms its heads
    k_weight,
    keys,  # [T, kv_heads, D]: where rotated keys and the values go
    values,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    NORMED: tl.constexpr,
    BLOCK: tl.constexpr,  # heads a program
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    half = tl.arange(0, D // 2)
    base = qkv + token * ((HEADS + 2 * KV_HEADS) * D)
    inside = (head < HEADS + KV_HEADS)[:, None] & (half >= 0)[None, :]
    offsets = head[:, None] * D + half[None, :]
    first = tl.load(base + offsets, mask=inside, other=0.0)
    second = tl.load(base + offsets + D // 2, mask=inside, other=0.0)
    if NORMED:
        wide1, wide2 = first.to(tl.float32), second.to(tl.float32)
        mean = (tl.sum(wide1 * wide1, 1) + tl.sum(wide2 * wide2, 1)) / D
        factor = tl.rsqrt(mean + eps)[:, None]
        is_query = (head < HEADS)[:, None]
        weight1 = tl.where(
            is_query, tl.load(q_weight + half)[None, :], tl.load(k_weight + half)[None, :]
        )
        weight2 = tl.where(
            is_query,
            tl.load(q_weight + D // 2 + half)[None, :],
            tl.load(k_weight + D // 2 + half)[None, :],
        )
        wide1 = (wide1 * factor).to(first.dtype).to(tl.float32) * weight1.to(tl.float32)
        wide2 = (wide2 * factor).to(second.dtype).to(tl.float32) * weight2.to(tl.float32)
        first, second = wide1.to(first.dtype), wide2.to(second.dtype)
    position = tl.load(positions + token).to(tl.int64)
    c = tl.load(cos + position * D + half)[None, :].to(tl.float32)  # both halves are the same
    s = tl.load(sin + position * D + half)[None, :].to(tl.float32)
    wide1, wide2 = first.to(tl.float32), second.to(tl.float32)
    turned1 = (wide1 * c - wide2 * s).to(first.dtype)
    turned2 = (wide2 * c + wide1 * s).to(first.dtype)
    is_query = (head < HEADS)[:, None] & inside
    tl.store(base + offsets, turned1, mask=is_query)
    tl.store(base + offsets + D // 2, turned2, mask=is_query)
    is_key = (head >= HEADS)[:, None] & inside
    to = token * (KV_HEADS * D) + (head - HEADS)[:, None] * D + half[None, :]
    tl.store(keys + to, turned1, mask=is_key)
    tl.store(keys + to + D // 2, turned2, mask=is_key)
    # The values of the key heads that this program has.
    from_value = base + (head + KV_HEADS)[:, None] * D + half[None, :]
    value1 = tl.load(from_value, mask=is_key, other=0.0)
    value2 = tl.load(from_value + D // 2, mask=is_key, other=0.0)
    tl.store(values + to, value1, mask=is_key)
    tl.store(values + to + D // 2, value2, mask=is_key)


def rotate(
    qkv: Tensor, positions: Tensor, turn: Turn, keys: Tensor, values: Tensor, heads: int
) -> None:
    """q in place; rotated keys, and the values, to theirs.

    qkv [T, (heads + 2 · kv_heads) · D]; positions [T]; keys, values [T, kv_heads, D].
    """
    tokens, kv_heads, dim = keys.shape
    block = 8
    _rotate[(tokens, triton.cdiv(heads + kv_heads, block))](
        qkv,
        positions,
        turn.cos,
        turn.sin,
        *(turn.weights or (turn.cos, turn.cos)),
        keys,
        values,
        turn.eps,
        HEADS=heads,
        KV_HEADS=kv_heads,
        D=dim,
        NORMED=turn.weights is not None,
        BLOCK=block,
        num_warps=4,
    )
