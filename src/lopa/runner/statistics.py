"""From logits to what a decoder needs: a token, its probability, a ranking confidence.

Everything in fp32 or better. The mask token is never predicted, but it keeps its share of the
softmax, so confidences are those of the published loops. Sampling uses a counter-based generator
keyed by (seed, round, position, token id): it does not depend on the batch, the branch, the rank or
the device, and every rank of a group samples the same token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from lopa.config import DecodeConfig

ENTROPY_EPS = 1e-10  # as published: p · log(p + eps)

# The signature of `statistics`: logits, positions, rounds, mask_id, config
Statistics: TypeAlias = Callable[
    [Tensor, Tensor, Tensor, int, DecodeConfig], tuple[Tensor, Tensor, Tensor]
]


def statistics(
    logits: Tensor,  # [N, vocab]
    positions: Tensor,  # [N] absolute
    rounds: Tensor,  # [N] number of the round
    mask_id: int,
    config: DecodeConfig,
) -> tuple[Tensor, Tensor, Tensor]:
    """token [N] int64, max_prob [N] and ranking [N] in fp32 or better."""
    # Fast-dLLM is published with a softmax in fp64: at 1 − 1e-9, fp32 has only ties.
    logits = logits.double() if config.needs_fp64 else logits.float()
    if config.temperature > 0:
        unfiltered = logits = logits / config.temperature
        logits = _keep_top(logits, config.top_p, config.top_k)
    probs = torch.softmax(logits, dim=-1)
    if config.temperature > 0:
        ids = torch.arange(logits.shape[1], device=logits.device)
        keys = logits + gumbel(positions, rounds, config.seed, ids)
        keys[:, mask_id] = -torch.inf
        # Where the filter left nothing but the mask token, the best other token stands in.
        only_mask = torch.isneginf(keys.amax(dim=-1))
        keys[only_mask] = unfiltered[only_mask]
        keys[only_mask, mask_id] = -torch.inf
    else:
        keys = logits.clone()
        keys[:, mask_id] = -torch.inf
    token = keys.argmax(dim=-1)
    max_prob = probs.gather(-1, token[:, None])[:, 0]
    if config.ranking == "max_prob":
        return token, max_prob, max_prob
    if config.ranking == "margin":
        # To the best other token, the mask included: negative when that one is likelier.
        others = probs.scatter(-1, token[:, None], -1.0)
        return token, max_prob, max_prob - others.amax(dim=-1)
    return token, max_prob, (probs * torch.log(probs + ENTROPY_EPS)).sum(dim=-1)


def _keep_top(logits: Tensor, top_p: float, top_k: int) -> Tensor:
    """top-p, then top-k: everything else becomes −inf. The most likely token always stays."""
    if top_p < 1.0:
        ordered, order = logits.sort(dim=-1, descending=True, stable=True)
        before = torch.softmax(ordered, dim=-1).cumsum(dim=-1).roll(1, dims=-1)
        before[:, 0] = 0.0
        dropped = torch.zeros_like(logits, dtype=torch.bool)
        dropped.scatter_(-1, order, before > top_p)
        logits = logits.masked_fill(dropped, -torch.inf)
    if 0 < top_k < logits.shape[-1]:
        least = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    return logits


def gumbel(positions: Tensor, rounds: Tensor, seed: int, ids: Tensor) -> Tensor:
    """[N, ids] Gumbel noise: the argmax of logits + noise is a sample of their softmax."""
    row = _mix(_mix(positions * 0x9E3779B1 + rounds) ^ seed)
    bits = _mix(row[:, None] + ids[None, :] * 0x2545F4914F6CDD1D)
    uniform = ((bits >> 11) & ((1 << 52) - 1)).double().add_(0.5).mul_(2.0**-52)
    return -torch.log(-torch.log(uniform)).float()


def _mix(x: Tensor) -> Tensor:
    """Finaliser of splitmix64 on int64, whose overflow wraps on every device."""
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * -0x40A7B892E31B1A47
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * -0x6B2FB644ECCEEE15
    return x ^ ((x >> 31) & ((1 << 33) - 1))
