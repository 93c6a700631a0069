"""From logits to token, probability and ranking confidence, without leaving the device.

The same as `lopa.runner.statistics` for everything but top-p, top-k and fp64. The logits of a
position are split into chunks, one program each, which reads them once. The first kernel finds the
largest logit of each, its share of the softmax and its best token (the argmax, or a sample by
Gumbel noise from the same counters). The second computes each chunk's share of the ranking from
these. The third combines the chunks.

Where ranks have a part of the vocabulary each, every rank computes its own chunks, and what each of
the first two kernels found is summed over the ranks: a rank leaves zeros for the chunks of others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import libdevice

RANKINGS = {"max_prob": 0, "margin": 1, "neg_entropy": 2}
BLOCK = 8192  # logits a program
WARPS = 4
_FIELDS = 5  # of a chunk, in what `_scan` finds


class VocabularyPart(NamedTuple):
    """Which of the logits a rank has."""

    first: int  # id of its first
    index: int  # of the part
    count: int  # parts
    widest: int  # logits of the widest part
    sum_parts: Callable[[Tensor], Tensor]  # in place, over the ranks


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
    found,  # [N, 5, CHUNKS] fp32: largest, total, best key, best token (exact), its logit
    vocab,  # logits of a row
    stride,
    first_id,  # of the logits
    first_chunk,  # the first of those that are computed here
    mask_id,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    SAMPLING: tl.constexpr,  # whether any temperature is above 0
    NEVER: tl.constexpr,  # 0: `never` and `expected` are not read
):
    row = tl.program_id(0).to(tl.int64)
    begin = tl.program_id(1) * BLOCK
    if tl.load(settings + row * 4 + 3) < 0:
        return
    at = begin + tl.arange(0, BLOCK)
    inside = at < vocab
    x = tl.load(logits + row * stride + at, mask=inside, other=-float("inf")).to(tl.float32)
    ids = first_id + at
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
        token = first_id + begin + where
        chosen = best
        if NEVER > 0:
            largest = tl.max(x, 0)
        else:
            mask_at = mask_id - first_id
            has_mask = (mask_at >= begin) & (mask_at < begin + BLOCK) & (mask_at < vocab)
            masks = tl.load(logits + row * stride + mask_at, mask=has_mask, other=-float("inf"))
            largest = tl.maximum(best, masks.to(tl.float32))
    # A rank's last chunk may be empty where another's is not: then all of x is −inf.
    total = tl.sum(tl.exp(x - tl.where(begin < vocab, largest, 0.0)), 0)
    place = found + row * (5 * CHUNKS) + first_chunk + tl.program_id(1)
    tl.store(place, largest)
    tl.store(place + CHUNKS, total)
    tl.store(place + 2 * CHUNKS, best)
    tl.store(place + 3 * CHUNKS, token.to(tl.float32))
    tl.store(place + 4 * CHUNKS, chosen)


@triton.jit
def _combined(found, row, CHUNKS: tl.constexpr, LANES: tl.constexpr):
    """largest, total, token and its logit over all chunks."""
    chunks = tl.arange(0, LANES)
    live = chunks < CHUNKS
    place = found + row * (5 * CHUNKS) + chunks
    peaks = tl.load(place, mask=live, other=-float("inf"))
    largest = tl.max(peaks, 0)
    total = tl.sum(tl.load(place + CHUNKS, mask=live, other=0.0) * tl.exp(peaks - largest), 0)
    keys = tl.load(place + 2 * CHUNKS, mask=live, other=-float("inf"))
    ids = tl.load(place + 3 * CHUNKS, mask=live, other=0.0).to(tl.int32)
    token = tl.min(tl.where(live & (keys == tl.max(keys, 0)), ids, 0x7FFFFFFF), 0)
    logits = tl.load(place + 4 * CHUNKS, mask=live, other=-float("inf"))
    chosen = tl.max(tl.where(ids == token, logits, -float("inf")), 0)
    return largest, total, token, chosen


@triton.jit
def _rank(
    logits,
    settings,
    temperature,
    found,
    shares,  # [N, CHUNKS] fp32: of the negative entropy, or the largest logit of the others
    vocab,
    stride,
    first_id,
    first_chunk,
    CHUNKS: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
    SAMPLING: tl.constexpr,
    NATIVE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    ranking = tl.load(settings + row * 4 + 3)
    if ranking <= 0:
        return
    at = chunk * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + at, mask=at < vocab, other=-float("inf")).to(tl.float32)
    if SAMPLING:
        tempered = tl.load(settings + row * 4 + 2)
        if tempered != 0:
            x = x / tl.load(temperature + row)
    largest, total, token, _ = _combined(found, row, CHUNKS, LANES)
    if ranking == 1:
        share = tl.max(tl.where(first_id + at == token, -float("inf"), x), 0)
    else:
        p = tl.exp(x - largest) * (1.0 / total)
        share = tl.sum(p * _log(p + 1e-10, NATIVE), 0)
    tl.store(shares + row * CHUNKS + first_chunk + chunk, share)


@triton.jit
def _finish(settings, found, shares, out, count, CHUNKS: tl.constexpr, LANES: tl.constexpr):
    """out [3, N]: token (int32), the bits of max_prob and of the ranking (fp32)."""
    row = tl.program_id(0).to(tl.int64)
    ranking = tl.load(settings + row * 4 + 3)
    if ranking < 0:
        return
    largest, total, token, chosen = _combined(found, row, CHUNKS, LANES)
    probability = tl.exp(chosen - largest) / total
    confidence = probability
    if ranking > 0:
        chunks = tl.arange(0, LANES)
        place = shares + row * CHUNKS + chunks
        if ranking == 1:
            other = tl.max(tl.load(place, mask=chunks < CHUNKS, other=-float("inf")), 0)
            confidence = probability - tl.exp(other - largest) / total
        else:
            confidence = tl.sum(tl.load(place, mask=chunks < CHUNKS, other=0.0), 0)
    tl.store(out + row, token)
    tl.store(out + count + row, probability.to(tl.int32, bitcast=True))
    tl.store(out + 2 * count + row, confidence.to(tl.int32, bitcast=True))


def confidence(
    logits: Tensor,  # [N, vocab], or a part of them
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
    part: VocabularyPart | None = None,  # None: these are all logits
) -> None:
    """never, expected: both or neither"""
    (count, vocab), device = logits.shape, logits.device
    widest = vocab if part is None else part.widest
    block = min(BLOCK, triton.next_power_of_2(widest))
    own = chunks = triton.cdiv(widest, block)
    first = 0, 0  # id, chunk
    new = torch.empty
    if part is not None:
        chunks, first, new = part.count * own, (part.first, part.index * own), torch.zeros
    lanes = triton.next_power_of_2(chunks)
    found = new(count, _FIELDS, chunks, dtype=torch.float32, device=device)
    shares = new(count, chunks, dtype=torch.float32, device=device)
    common = {"CHUNKS": chunks, "BLOCK": block, "SAMPLING": sampling, "num_warps": WARPS}
    sizes = vocab, logits.stride(0), *first
    unread = settings  # in place of what is not read
    _scan[(count, own)](
        logits,
        settings,
        temperature,
        unread if never is None else never,
        unread if expected is None else expected,
        found,
        *sizes,
        mask_id,
        NEVER=0 if never is None else never.shape[1],
        **common,
    )
    if part is not None:
        part.sum_parts(found)
    _rank[(count, own)](
        logits,
        settings,
        temperature,
        found,
        shares,
        *sizes,
        LANES=lanes,
        NATIVE=logits.is_cuda,
        **common,
    )
    if part is not None:
        part.sum_parts(shares)
    _finish[(count,)](settings, found, shares, out, count, CHUNKS=chunks, LANES=lanes, num_warps=1)
