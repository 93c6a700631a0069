"""What lies between the matrix products of a layer, one kernel each: norms and activation.

Where the product that follows is quantised, the kernel also writes its input as fp8 or int8 with
one scale a token, so that no extra pass over memory is spent on it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lopa.engine.scaled import LARGEST, Scaled


@triton.jit
def _to_type(x, step, LARGEST: tl.constexpr, target: tl.constexpr):
    """x / step, rounded to the nearest, as torch does; the largest x is LARGEST steps."""
    x = x * (1.0 / step)
    if LARGEST == 127.0:
        # nearest even: adding and taking away 1.5 · 2²³ leaves a whole number in fp32
        x = (x + 12582912.0) - 12582912.0
    return x.to(target)


@triton.jit
def _norm(
    x,  # [T, size], the residual stream; with ADD it is written too
    delta,  # [T, size] to be added to it first
    weight,
    out,  # [T, size]
    scale,  # [T] when quantised
    size,
    eps,
    ADD: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < size
    value = tl.load(x + token * size + at, mask=inside, other=0.0)
    if ADD:
        more = tl.load(delta + token * size + at, mask=inside, other=0.0)
        value = (value.to(tl.float32) + more.to(tl.float32)).to(x.dtype.element_ty)
        tl.store(x + token * size + at, value, mask=inside)
    wide = value.to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide) / size + eps)
    # Rounded to the model's type before the weight, as the plain norm does.
    factor = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    normed = wide.to(x.dtype.element_ty).to(tl.float32) * factor
    if LARGEST > 0:
        step = tl.maximum(tl.max(tl.abs(normed)), 1e-12) / LARGEST
        tl.store(scale + token, step)
        normed = _to_type(normed, step, LARGEST, out.dtype.element_ty)
    tl.store(out + token * size + at, normed.to(out.dtype.element_ty), mask=inside)


def norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, quantised: torch.dtype | None
) -> Tensor | Scaled:
    """RMSNorm of x + delta, [T, size]; x becomes that sum."""
    tokens, size = x.shape
    out = torch.empty(tokens, size, dtype=quantised or x.dtype, device=x.device)
    scale = x.new_empty((tokens, 1), dtype=torch.float32)
    _norm[(tokens,)](
        x,
        x if delta is None else delta,
        weight,
        out,
        scale,
        size,
        eps,
        ADD=delta is not None,
        LARGEST=LARGEST[quantised] if quantised else 0.0,
        BLOCK=triton.next_power_of_2(size),
        num_warps=8 if size > 1024 else 4,
    )
    return Scaled(out, scale) if quantised else out


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
    """silu(gate) · up in fp32 at these places of a token; zero past its end."""
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
    """The same with one scale a token: all of a token in one program, read once.

    Two pieces, since one whose length is a power of two would be idle for up to half of it.
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


def activate(gate_up: Tensor, quantised: torch.dtype | None) -> Tensor | Scaled:
    """SwiGLU: silu(gate) · up, [T, 2 · size] → [T, size]."""
    tokens, double = gate_up.shape
    size = double // 2
    out = torch.empty(tokens, size, dtype=quantised or gate_up.dtype, device=gate_up.device)
    if quantised is None:
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
        LARGEST=LARGEST[quantised],
        BLOCK=block,
        REST=triton.next_power_of_2(size - block) if size > block else 0,
        num_warps=16 if block > 4096 else 8,
        maxnreg=64,  # so that a multiprocessor holds two tokens at once
    )
    return Scaled(out, scale)


@triton.jit
def _quantise(x, out, scale, size, LARGEST: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < size
    value = tl.load(x + token * size + at, mask=inside, other=0.0).to(tl.float32)
    step = tl.maximum(tl.max(tl.abs(value)), 1e-12) / LARGEST
    tl.store(scale + token, step)
    value = _to_type(value, step, LARGEST, out.dtype.element_ty)
    tl.store(out + token * size + at, value, mask=inside)


def quantise(x: Tensor, quantised: torch.dtype) -> Scaled:
    """[T, size] with one scale a token."""
    tokens, size = x.shape
    out = torch.empty(tokens, size, dtype=quantised, device=x.device)
    scale = torch.empty(tokens, 1, dtype=torch.float32, device=x.device)
    _quantise[(tokens,)](
        x,
        out,
        scale,
        size,
        LARGEST=LARGEST[quantised],
        BLOCK=triton.next_power_of_2(size),
        num_warps=8 if size > 1024 else 4,
    )
    return Scaled(out, scale)
