"""The kernels between the matrix products of a layer: norms, RoPE, activation.

Where the next product is quantized, the kernel writes its input as fp8 or int8 with one scale per
token, which saves a pass over memory. Where the product before is that of experts, the norm adds up
what they found, always in the order of a token's choices. What the experts of a part of a model
found has to be summed over ranks before: `weighted_sum` adds it up.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from lopa.kernels.hopper.common import available
from lopa.kernels.scaled import LARGEST, Scaled


class Weighted(NamedTuple):
    """What a token's experts found, each with its weight."""

    values: Tensor  # [T, choices, size]
    weights: Tensor  # [T, choices] fp32


@triton.jit
def _to_type(x, step, LARGEST: tl.constexpr, target: tl.constexpr):
    """x / step, rounded to the nearest, as torch does; the largest x is LARGEST steps."""
    x = x * (1.0 / step)
    if LARGEST == 127.0:
        # nearest even: adding and taking away 1.5 · 2²³ leaves a whole number in fp32
        x = (x + 12582912.0) - 12582912.0
    return x.to(target)


@triton.jit
def _weighted(values, weights, token, size, at, CHOICES: tl.constexpr, BLOCK: tl.constexpr):
    """What a token's experts found, added up in fp32 in the order of its choices."""
    total = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(CHOICES):
        place = token * CHOICES + choice
        found = tl.load(values + place * size + at, mask=at < size, other=0.0)
        total += found.to(tl.float32) * tl.load(weights + place)
    return total


@triton.jit
def _weighted_sum(values, weights, out, size, CHOICES: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = _weighted(values, weights, token, size, at, CHOICES, BLOCK)
    tl.store(out + token * size + at, total.to(out.dtype.element_ty), mask=at < size)


def weighted_sum(given: Weighted) -> Tensor:
    """[T, choices, size] → [T, size]"""
    tokens, choices, size = given.values.shape
    out = given.values.new_empty(tokens, size)
    block = min(1024, triton.next_power_of_2(size))
    grid = tokens, triton.cdiv(size, block)
    _weighted_sum[grid](*given, out, size, CHOICES=choices, BLOCK=block)
    return out


@triton.jit
def _norm(
    x,  # [T, size], the residual stream; with ADD it is written too
    delta,  # [T, size] to be added to it first, or [T, CHOICES, size]
    choice_weights,  # [T, CHOICES]
    weight,
    out,  # [T, size]
    plain,  # [T, size]: with BOTH the same, not quantized
    scale,  # [T] when quantized
    size,
    eps,
    ADD: tl.constexpr,
    CHOICES: tl.constexpr,  # 0: delta is one tensor
    BOTH: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,  # lets a kernel behind this one start early, which waits by itself
):
    if EARLY:
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < size
    value = tl.load(x + token * size + at, mask=inside, other=0.0)
    if ADD:
        if CHOICES > 0:
            total = _weighted(delta, choice_weights, token, size, at, CHOICES, BLOCK)
            more = total.to(x.dtype.element_ty)
        else:
            more = tl.load(delta + token * size + at, mask=inside, other=0.0)
        value = (value.to(tl.float32) + more.to(tl.float32)).to(x.dtype.element_ty)
        tl.store(x + token * size + at, value, mask=inside)
    wide = value.to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide) / size + eps)
    # Rounded to the model's type before the weight, as the plain norm does.
    factor = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    normed = wide.to(x.dtype.element_ty).to(tl.float32) * factor
    if BOTH:
        tl.store(plain + token * size + at, normed.to(plain.dtype.element_ty), mask=inside)
    if LARGEST > 0:
        step = tl.maximum(tl.max(tl.abs(normed)), 1e-12) / LARGEST
        tl.store(scale + token, step)
        normed = _to_type(normed, step, LARGEST, out.dtype.element_ty)
    tl.store(out + token * size + at, normed.to(out.dtype.element_ty), mask=inside)


def norm(
    x: Tensor,
    delta: Tensor | Weighted | None,
    weight: Tensor,
    eps: float,
    quantized: torch.dtype | None,
) -> Tensor | Scaled:
    """RMSNorm of x + delta, [T, size]; x becomes that sum."""
    return _normed(x, delta, weight, eps, quantized, x)


def norm_both(
    x: Tensor, delta: Tensor | Weighted | None, weight: Tensor, eps: float, quantized: torch.dtype
) -> tuple[Tensor, Scaled]:
    """The same as it is, and quantized."""
    plain = torch.empty_like(x)
    scaled = _normed(x, delta, weight, eps, quantized, plain)
    assert isinstance(scaled, Scaled)
    return plain, scaled


def _normed(
    x: Tensor,
    delta: Tensor | Weighted | None,
    weight: Tensor,
    eps: float,
    quantized: torch.dtype | None,
    plain: Tensor,  # x: not wanted
) -> Tensor | Scaled:
    tokens, size = x.shape
    out = torch.empty(tokens, size, dtype=quantized or x.dtype, device=x.device)
    scale = x.new_empty((tokens, 1), dtype=torch.float32)
    values, weights = delta if isinstance(delta, Weighted) else (delta, scale)
    _norm[(tokens,)](
        x,
        x if values is None else values,
        weights,
        weight,
        out,
        plain,
        scale,
        size,
        eps,
        ADD=values is not None,
        CHOICES=weights.shape[1] if isinstance(delta, Weighted) else 0,
        BOTH=plain is not x,
        LARGEST=LARGEST[quantized] if quantized else 0.0,
        BLOCK=triton.next_power_of_2(size),
        EARLY=available(x.device) and not quantized,
        num_warps=8 if size > 1024 else 4,
    )
    return Scaled(out, scale) if quantized else out


@triton.jit
def _activate(
    gate_up,  # [T, 2 · size]
    out,  # [T, size]
    size,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = _active(gate_up, token, size, at)
    tl.store(out + token * size + at, value.to(out.dtype.element_ty), mask=at < size)


@triton.jit
def _active(gate_up, token, size, at):
    """silu(gate) · up in fp32 at these indices of a token; zero past its end."""
    inside = at < size
    gate = tl.load(gate_up + token * 2 * size + at, mask=inside, other=0.0)
    up = tl.load(gate_up + (token * 2 + 1) * size + at, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    return (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32) * up.to(tl.float32)


@triton.jit
def _activate_scaled(
    gate_up,  # [T, 2 · size]
    out,  # [T, size]
    scale,  # [T]
    size,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,  # at most size
    REST: tl.constexpr,  # at least what is left
):
    """The same with one scale per token: one program reads all of a token, once.

    In two pieces: lengths are powers of two, and of a single one almost half could be padding.
    """
    token = tl.program_id(0).to(tl.int64)
    first = tl.arange(0, BLOCK)
    value = _active(gate_up, token, size, first)
    peak = tl.max(tl.abs(value))
    if REST > 0:
        rest = BLOCK + tl.arange(0, REST)
        more = _active(gate_up, token, size, rest)
        peak = tl.maximum(peak, tl.max(tl.abs(more)))
    step = tl.maximum(peak, 1e-12) / LARGEST
    tl.store(scale + token, step)
    place = out + token * size
    tl.store(place + first, _to_type(value, step, LARGEST, out.dtype.element_ty))
    if REST > 0:
        more = _to_type(more, step, LARGEST, out.dtype.element_ty)
        tl.store(place + rest, more, mask=rest < size)


def activate(gate_up: Tensor, quantized: torch.dtype | None) -> Tensor | Scaled:
    """SwiGLU: silu(gate) · up, [T, 2 · size] → [T, size]."""
    tokens, double = gate_up.shape
    size = double // 2
    out = torch.empty(tokens, size, dtype=quantized or gate_up.dtype, device=gate_up.device)
    if quantized is None:
        block = min(1024, triton.next_power_of_2(size))
        _activate[(tokens, triton.cdiv(size, block))](gate_up, out, size, BLOCK=block)
        return out
    scale = gate_up.new_empty((tokens, 1), dtype=torch.float32)
    block = 1 << (size.bit_length() - 1)
    _activate_scaled[(tokens,)](
        gate_up,
        out,
        scale,
        size,
        LARGEST=LARGEST[quantized],
        BLOCK=block,
        REST=triton.next_power_of_2(size - block) if size > block else 0,
        num_warps=16 if block > 4096 else 8,
        maxnreg=64,  # two programs fit a multiprocessor
    )
    return Scaled(out, scale)


@triton.jit
def _quantize_rows(x, out, scale, size, LARGEST: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < size
    value = tl.load(x + token * size + at, mask=inside, other=0.0).to(tl.float32)
    step = tl.maximum(tl.max(tl.abs(value)), 1e-12) / LARGEST
    tl.store(scale + token, step)
    value = _to_type(value, step, LARGEST, out.dtype.element_ty)
    tl.store(out + token * size + at, value, mask=inside)


def quantize_rows(x: Tensor, quantized: torch.dtype) -> Scaled:
    """[T, size] with one scale per token."""
    tokens, size = x.shape
    out = torch.empty(tokens, size, dtype=quantized, device=x.device)
    scale = torch.empty(tokens, 1, dtype=torch.float32, device=x.device)
    _quantize_rows[(tokens,)](
        x,
        out,
        scale,
        size,
        LARGEST=LARGEST[quantized],
        BLOCK=triton.next_power_of_2(size),
        num_warps=8 if size > 1024 else 4,
    )
    return Scaled(out, scale)


@triton.jit
def _rotate(
    qkv,  # [T, (heads + 2 · kv_heads) · D], q is rotated in place
    cos,  # [T, R]
    sin,
    q_weight,  # [D] where the model norms its heads
    k_weight,
    keys,  # [T, kv_heads, D], written
    values,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,  # the first so many of a head turn, the rest passes
    HALF: tl.constexpr,  # at least half of them
    REST: tl.constexpr,  # at least the rest; 0: there is none
    NORMED: tl.constexpr,
    BLOCK: tl.constexpr,  # heads a program
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_query = (head < HEADS)[:, None]
    is_key = ((head >= HEADS) & (head < HEADS + KV_HEADS))[:, None]
    half = tl.arange(0, HALF)
    turns = (half < R // 2)[None, :]
    base = qkv + token * ((HEADS + 2 * KV_HEADS) * D)
    offsets = head[:, None] * D + half[None, :]
    first = tl.load(base + offsets, mask=(is_query | is_key) & turns, other=0.0)
    second = tl.load(base + offsets + R // 2, mask=(is_query | is_key) & turns, other=0.0)
    if REST > 0:
        beyond = R + tl.arange(0, REST)
        passes = (beyond < D)[None, :]
        past = head[:, None] * D + beyond[None, :]
        rest = tl.load(base + past, mask=(is_query | is_key) & passes, other=0.0)
    if NORMED:
        wide1, wide2 = first.to(tl.float32), second.to(tl.float32)
        squares = tl.sum(wide1 * wide1, 1) + tl.sum(wide2 * wide2, 1)
        if REST > 0:
            squares += tl.sum(rest.to(tl.float32) * rest.to(tl.float32), 1)
        factor = tl.rsqrt(squares / D + eps)[:, None]
        first = _scaled_head(first, factor, is_query, q_weight, k_weight, half, half < R // 2)
        second = _scaled_head(
            second, factor, is_query, q_weight, k_weight, R // 2 + half, half < R // 2
        )
        if REST > 0:
            rest = _scaled_head(rest, factor, is_query, q_weight, k_weight, beyond, beyond < D)
    # Both halves are the same.
    c = tl.load(cos + token * R + half, mask=half < R // 2, other=0.0)[None, :].to(tl.float32)
    s = tl.load(sin + token * R + half, mask=half < R // 2, other=0.0)[None, :].to(tl.float32)
    wide1, wide2 = first.to(tl.float32), second.to(tl.float32)
    turned1 = (wide1 * c - wide2 * s).to(first.dtype)
    turned2 = (wide2 * c + wide1 * s).to(first.dtype)
    tl.store(base + offsets, turned1, mask=is_query & turns)
    tl.store(base + offsets + R // 2, turned2, mask=is_query & turns)
    to = token * (KV_HEADS * D) + (head - HEADS)[:, None] * D + half[None, :]
    tl.store(keys + to, turned1, mask=is_key & turns)
    tl.store(keys + to + R // 2, turned2, mask=is_key & turns)
    # The values of the key heads that this program has.
    from_value = base + (head + KV_HEADS)[:, None] * D + half[None, :]
    value1 = tl.load(from_value, mask=is_key & turns, other=0.0)
    value2 = tl.load(from_value + R // 2, mask=is_key & turns, other=0.0)
    tl.store(values + to, value1, mask=is_key & turns)
    tl.store(values + to + R // 2, value2, mask=is_key & turns)
    if REST > 0:
        tl.store(base + past, rest, mask=is_query & passes)
        beyond_key = token * (KV_HEADS * D) + (head - HEADS)[:, None] * D + beyond[None, :]
        tl.store(keys + beyond_key, rest, mask=is_key & passes)
        value = tl.load(base + past + KV_HEADS * D, mask=is_key & passes, other=0.0)
        tl.store(values + beyond_key, value, mask=is_key & passes)


@triton.jit
def _scaled_head(x, factor, is_query, q_weight, k_weight, at, inside):
    """x · factor, rounded as the plain norm does, and times the norm's weight of its head."""
    of_query = tl.load(q_weight + at, mask=inside, other=0.0)[None, :]
    of_key = tl.load(k_weight + at, mask=inside, other=0.0)[None, :]
    weight = tl.where(is_query, of_query, of_key).to(tl.float32)
    return ((x.to(tl.float32) * factor).to(x.dtype).to(tl.float32) * weight).to(x.dtype)


def rotate(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    weights: tuple[Tensor, Tensor] | None,
    eps: float,
    keys: Tensor,
    values: Tensor,
    heads: int,
) -> None:
    """Norm the heads where the model does, rotate q in place, write rotated keys, and values.

    qkv [T, (heads + 2 · kv_heads) · D]; cos, sin [T, R], where the first R of a head turn; keys,
    values [T, kv_heads, D].
    """
    (tokens, kv_heads, dim), turned = keys.shape, cos.shape[1]
    block = 8
    q_weight, k_weight = weights if weights else (cos, cos)
    _rotate[(tokens, triton.cdiv(heads + kv_heads, block))](
        qkv,
        cos,
        sin,
        q_weight,
        k_weight,
        keys,
        values,
        eps,
        HEADS=heads,
        KV_HEADS=kv_heads,
        D=dim,
        R=turned,
        HALF=triton.next_power_of_2(turned // 2),
        REST=triton.next_power_of_2(dim - turned) if turned < dim else 0,
        NORMED=weights is not None,
        BLOCK=block,
        num_warps=4,
    )
