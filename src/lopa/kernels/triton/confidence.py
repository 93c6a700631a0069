"""From logits to token, probability and ranking confidence, without leaving the device.

The same as `lopa.runner.statistics` for everything but top-p, top-k and fp64. The logits of a
position are split into parts, one program each, which reads them once. The first kernel finds each
part's largest logit, its share of the softmax and its best token (the argmax, or a sample by Gumbel
noise from the same counters). The second computes each part's share of the ranking from these. The
third combines the parts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import libdevice

RANKINGS = {"max_prob": 0, "margin": 1, "neg_entropy": 2}
BLOCK = 8192  # logits a program
WARPS = 4


@triton.jit
def _mix(x):
    """splitmix64's finaliser on int64, as in lopa.runner.statistics."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit
def _log(x, NATIVE: tl.constexpr):
    """The device's own is off by at most 2⁻²² and is one instruction instead of twenty."""
    return libdevice.fast_logf(x) if NATIVE else tl.log(x)


@triton.jit
def _scan(
    logits,  # [N, vocab]
    settings,  # [N, 4] int64: position, seed, tempered, ranking; ranking < 0: padding
    temperature,  # [N] fp32; 0: the argmax
    never,  # [N, NEVER] int32: tokens that are not predicted; −1: none
    expected,  # [N] int32: the token that is asked for; −1: the predicted one
    found,  # [N, 4, PARTS] fp32: largest, total, best key, the best token's logit
    tokens,  # [N, PARTS] int32: the best token
    vocab,
    stride,
    mask_id,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    SAMPLING: tl.constexpr,  # whether any temperature is above 0
    NEVER: tl.constexpr,  # 0: `never` and `expected` are not read
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    if tl.load(settings + row * 4 + 3) < 0:
        return
    first = part * BLOCK
    ids = first + tl.arange(0, BLOCK)
    inside = ids < vocab
    x = tl.load(logits + row * stride + ids, mask=inside, other=-float("inf")).to(tl.float32)
    allowed = inside & (ids != mask_id)
    for k in tl.static_range(NEVER):
        allowed = allowed & (ids != tl.load(never + row * NEVER + k))
    if NEVER > 0:
        asked = tl.load(expected + row)
        allowed = tl.where(asked >= 0, ids == asked, allowed)
    if SAMPLING:
        heat = tl.load(temperature + row)
        keys = tl.where(allowed, x, -float("inf"))
        if heat > 0:
            position = tl.load(settings + row * 4)
            counter = _mix(_mix(position * 0x9E3779B1 + 1) ^ tl.load(settings + row * 4 + 1))
            bits = _mix(counter + ids.to(tl.int64) * 0x2545F4914F6CDD1D)
            uniform = ((bits >> 11) & 0xFFFFFFFFFFFFF).to(tl.float64)
            uniform = (uniform + 0.5) * 2.220446049250313e-16
            keys = keys / heat + (-tl.log(-tl.log(uniform))).to(tl.float32)
            tempered = tl.load(settings + row * 4 + 2)
            if tempered != 0:
                x = x / heat
        largest = tl.max(x, 0)  # of all logits, the mask's included
        best = tl.max(keys, 0)
        token = tl.min(tl.where(keys == best, ids, 0x7FFFFFFF), 0)  # ties go to the lower id
        chosen = tl.max(tl.where(ids == token, x, -float("inf")), 0)
    else:
        # Few passes over the block: one for the best token and its logit; of all logits only those
        # that are not allowed can be larger, and mostly that is the mask's alone.
        keys = tl.where(allowed, x, -float("inf"))
        best, where = tl.max(keys, 0, return_indices=True)  # ties go to the lower id
        token = first + where
        chosen = best
        if NEVER > 0:
            largest = tl.max(x, 0)
        else:
            has_mask = (mask_id >= first) & (mask_id < first + BLOCK)
            masks = tl.load(logits + row * stride + mask_id, mask=has_mask, other=-float("inf"))
            largest = tl.maximum(best, masks.to(tl.float32))
    total = tl.sum(tl.exp(x - largest), 0)
    place = found + row * (4 * PARTS) + part
    tl.store(place, largest)
    tl.store(place + PARTS, total)
    tl.store(place + 2 * PARTS, best)
    tl.store(place + 3 * PARTS, chosen)
    tl.store(tokens + row * PARTS + part, token)


@triton.jit
def _combined(found, tokens, row, PARTS: tl.constexpr, LANES: tl.constexpr):
    """largest, total, token and its logit over all parts."""
    parts = tl.arange(0, LANES)
    live = parts < PARTS
    place = found + row * (4 * PARTS) + parts
    peaks = tl.load(place, mask=live, other=-float("inf"))
    largest = tl.max(peaks, 0)
    total = tl.sum(tl.load(place + PARTS, mask=live, other=0.0) * tl.exp(peaks - largest), 0)
    keys = tl.load(place + 2 * PARTS, mask=live, other=-float("inf"))
    ids = tl.load(tokens + row * PARTS + parts, mask=live, other=0x7FFFFFFF)
    token = tl.min(tl.where(keys == tl.max(keys, 0), ids, 0x7FFFFFFF), 0)
    logits = tl.load(place + 3 * PARTS, mask=live, other=-float("inf"))
    chosen = tl.max(tl.where(ids == token, logits, -float("inf")), 0)
    return largest, total, token, chosen


@triton.jit
def _rank(
    logits,
    settings,
    temperature,
    found,
    tokens,
    shares,  # [N, PARTS] fp32: of the negative entropy, or the largest logit of the others
    vocab,
    stride,
    PARTS: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
    SAMPLING: tl.constexpr,
    NATIVE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    ranking = tl.load(settings + row * 4 + 3)
    if ranking <= 0:
        return
    ids = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + ids, mask=ids < vocab, other=-float("inf")).to(tl.float32)
    if SAMPLING:
        tempered = tl.load(settings + row * 4 + 2)
        if tempered != 0:
            x = x / tl.load(temperature + row)
    largest, total, token, _ = _combined(found, tokens, row, PARTS, LANES)
    if ranking == 1:
        share = tl.max(tl.where(ids == token, -float("inf"), x), 0)
    else:
        p = tl.exp(x - largest) * (1.0 / total)
        share = tl.sum(p * _log(p + 1e-10, NATIVE), 0)
    tl.store(shares + row * PARTS + part, share)


@triton.jit
def _finish(settings, found, tokens, shares, out, count, PARTS: tl.constexpr, LANES: tl.constexpr):
    """out [3, N]: token (int32), the bits of max_prob and of the ranking (fp32)."""
    row = tl.program_id(0).to(tl.int64)
    ranking = tl.load(settings + row * 4 + 3)
    if ranking < 0:
        return
    largest, total, token, chosen = _combined(found, tokens, row, PARTS, LANES)
    probability = tl.exp(chosen - largest) / total
    confidence = probability
    if ranking > 0:
        parts = tl.arange(0, LANES)
        place = shares + row * PARTS + parts
        if ranking == 1:
            other = tl.max(tl.load(place, mask=parts < PARTS, other=-float("inf")), 0)
            confidence = probability - tl.exp(other - largest) / total
        else:
            confidence = tl.sum(tl.load(place, mask=parts < PARTS, other=0.0), 0)
    tl.store(out + row, token)
    tl.store(out + count + row, probability.to(tl.int32, bitcast=True))
    tl.store(out + 2 * count + row, confidence.to(tl.int32, bitcast=True))


def confidence(
    logits: Tensor,  # [N, vocab]
    # [N, 4] int64: position, seed, tempered (1: the softmax too, as in parity mode; else 0),
    # ranking (RANKINGS; −1: padding)
    settings: Tensor,
    temperature: Tensor,  # [N] fp32
    mask_id: int,
    out: Tensor,  # [3, N] int32: token, and the bits of max_prob and ranking in fp32
    *,
    sampling: bool = True,  # False: every temperature is 0, and the noise is left out
    # [N, any] and [N] int32: other tokens that are not predicted, and the token that is asked for
    # in place of the predicted one; −1: none
    never: Tensor | None = None,
    expected: Tensor | None = None,
) -> None:
    """never, expected: both or neither"""
    count, vocab = logits.shape
    block = min(BLOCK, triton.next_power_of_2(vocab))
    parts = triton.cdiv(vocab, block)
    lanes = triton.next_power_of_2(parts)
    found = torch.empty(count, 4, parts, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(count, parts, dtype=torch.int32, device=logits.device)
    shares = torch.empty(count, parts, dtype=torch.float32, device=logits.device)
    common = {"PARTS": parts, "BLOCK": block, "SAMPLING": sampling, "num_warps": WARPS}
    stride = logits.stride(0)
    _scan[(count, parts)](
        logits,
        settings,
        temperature,
        tokens if never is None else never,
        tokens if expected is None else expected,
        found,
        tokens,
        vocab,
        stride,
        mask_id,
        NEVER=0 if never is None else never.shape[1],
        **common,
    )
    _rank[(count, parts)](
        logits,
        settings,
        temperature,
        found,
        tokens,
        shares,
        vocab,
        stride,
        LANES=lanes,
        NATIVE=logits.is_cuda,
        **common,
    )
    _finish[(count,)](
        settings, found, tokens, shares, out, count, PARTS=parts, LANES=lanes, num_warps=1
    )
