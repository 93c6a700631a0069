"""From logits to token, probability and ranking confidence, without leaving the device.

The same as `lopa.engine.statistics` for everything but top-p, top-k and fp64: one program a wanted
position, two passes over its logits. The first finds the largest, the sum of the softmax and the
token (the argmax, or a draw by Gumbel noise from the same counters); the second one the ranking.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

RANKINGS = {"max_prob": 0, "margin": 1, "neg_entropy": 2}


@triton.jit
def _mix(x):
    """splitmix64's finaliser on int64, as in lopa.engine.statistics."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit
def _confidence(
    logits,  # [N, vocab]
    settings,  # [N, 4] int64: position, round, seed, ranking; ranking < 0: padding
    temperature,  # [N] fp32; 0: the argmax
    token_out,  # [N] int32
    max_prob_out,  # [N] fp32
    ranking_out,  # [N] fp32
    vocab,
    stride,
    mask_id,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    ranking = tl.load(settings + row * 4 + 3)
    if ranking < 0:
        return
    position = tl.load(settings + row * 4)
    turn = tl.load(settings + row * 4 + 1)
    seed = tl.load(settings + row * 4 + 2)
    heat = tl.load(temperature + row)
    drawn = heat > 0
    divisor = tl.where(drawn, heat, 1.0)
    counter = _mix(_mix(position * 0x9E3779B1 + turn) ^ seed)
    base = logits + row * stride

    largest = -float("inf")  # of all logits, the mask's included
    total = 0.0  # of exp(logit − largest)
    best = -float("inf")  # of the keys, the mask left out
    token = 0
    chosen = -float("inf")  # its logit
    for begin in range(0, vocab, BLOCK):
        ids = begin + tl.arange(0, BLOCK)
        inside = ids < vocab
        x = tl.load(base + ids, mask=inside, other=-float("inf")).to(tl.float32) / divisor
        top = tl.maximum(largest, tl.max(x, 0))
        total = total * tl.exp(largest - top) + tl.sum(tl.exp(x - top), 0)
        largest = top
        keys = tl.where(inside & (ids != mask_id), x, -float("inf"))
        if drawn:
            bits = _mix(counter + ids.to(tl.int64) * 0x2545F4914F6CDD1D)
            uniform = ((bits >> 11) & 0xFFFFFFFFFFFFF).to(tl.float64)
            uniform = (uniform + 0.5) * 2.220446049250313e-16
            keys = keys + (-tl.log(-tl.log(uniform))).to(tl.float32)
        here = tl.max(keys, 0)
        if here > best:  # ties go to the lower id
            best = here
            token = tl.min(tl.where(keys == here, ids, 0x7FFFFFFF), 0)
            chosen = tl.max(tl.where(ids == token, x, -float("inf")), 0)
    probability = tl.exp(chosen - largest) / total
    tl.store(token_out + row, token)
    tl.store(max_prob_out + row, probability)
    confidence = probability
    if ranking > 0:
        entropy = 0.0
        other = -float("inf")
        for begin in range(0, vocab, BLOCK):
            ids = begin + tl.arange(0, BLOCK)
            inside = ids < vocab
            x = tl.load(base + ids, mask=inside, other=-float("inf")).to(tl.float32) / divisor
            p = tl.exp(x - largest) / total
            entropy += tl.sum(p * tl.log(p + 1e-10), 0)
            other = tl.maximum(other, tl.max(tl.where(ids == token, -float("inf"), x), 0))
        margin = probability - tl.exp(other - largest) / total
        confidence = tl.where(ranking == 1, margin, entropy)
    tl.store(ranking_out + row, confidence)


def confidence(
    logits: Tensor,  # [N, vocab]
    settings: Tensor,  # [N, 4] int64: position, round, seed, ranking (RANKINGS; −1: padding)
    temperature: Tensor,  # [N] fp32
    mask_id: int,
    out: Tensor,  # [3, N] int32: token, and the bits of max_prob and ranking in fp32
) -> None:
    count, vocab = logits.shape
    _confidence[(count,)](
        logits,
        settings,
        temperature,
        out[0],
        out[1].view(torch.float32),
        out[2].view(torch.float32),
        vocab,
        logits.stride(0),
        mask_id,
        BLOCK=min(4096, triton.next_power_of_2(vocab)),
        num_warps=8,
    )
