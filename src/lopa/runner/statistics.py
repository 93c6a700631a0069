"""From logits to what a decoder needs: a token, its probability, a ranking confidence.

Everything in fp32 or better. The mask token is never predicted, but it keeps its share of the
softmax, so confidences are those of the published loops. So do other tokens that a plan excludes.

A sampled token is one of the distribution that temperature, top-p and top-k shape. Its probability
and ranking are those of the model's own distribution, at temperature 1 and over all tokens, so a
threshold means the same at every temperature. Parity mode takes both from the shaped distribution,
as the published loops do.

Sampling uses a counter-based generator keyed by (seed, position, token id): it does not depend on
the batch, the branch, the rank or the device, and every rank of a group samples the same token. Nor
does it depend on the round: a position keeps its noise while its distribution changes, so a sampled
token is as stable as a greedy one. Branches and anchor sample alike, so it means something that the
anchor still samples a token, and the answer does not depend on how many rounds were needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from lopa.config import DecodeConfig

ENTROPY_EPS = 1e-10  # as published: p · log(p + eps)

# The signature of `statistics`: logits, positions, mask_id, config, never, expected
Statistics: TypeAlias = Callable[
    [Tensor, Tensor, int, DecodeConfig, Sequence[int], Tensor | None],
    tuple[Tensor, Tensor, Tensor],
]


def statistics(
    logits: Tensor,  # [N, vocab]
    positions: Tensor,  # [N] absolute
    mask_id: int,
    config: DecodeConfig,
    never: Sequence[int] = (),  # other tokens that are not predicted
    expected: Tensor | None = None,  # [N] the token that is asked for; −1: the predicted one
) -> tuple[Tensor, Tensor, Tensor]:
    """token [N] int64, max_prob [N] and ranking [N] in fp32 or better."""
    excluded = [mask_id, *never]
    # Fast-dLLM is published with a softmax in fp64: at 1 − 1e-9, fp32 has only ties.
    logits = logits.double() if config.needs_fp64 else logits.float()
    if config.temperature > 0:
        shaped = keep_top(logits / config.temperature, config.top_p, config.top_k)
        ids = torch.arange(logits.shape[1], device=logits.device)
        keys = shaped + gumbel(positions, config.seed, ids)
        keys[:, excluded] = -torch.inf
        # Where the filter left nothing but such tokens, the best other token stands in.
        left_out = torch.isneginf(keys.amax(dim=-1))
        keys[left_out] = logits[left_out]
        if config.tempers_confidence:
            logits = shaped
    else:
        keys = logits.clone()
    keys[:, excluded] = -torch.inf
    if expected is not None:
        keys = only_expected(keys, expected, torch.arange(keys.shape[1], device=keys.device))
    token = keys.argmax(dim=-1)
    probs = torch.softmax(logits, dim=-1)
    max_prob = probs.gather(-1, token[:, None])[:, 0]
    if config.ranking == "max_prob":
        return token, max_prob, max_prob
    if config.ranking == "margin":
        # To the best other token, the mask included: negative when that one is likelier.
        others = probs.scatter(-1, token[:, None], -1.0)
        return token, max_prob, max_prob - others.amax(dim=-1)
    return token, max_prob, (probs * torch.log(probs + ENTROPY_EPS)).sum(dim=-1)


def only_expected(keys: Tensor, expected: Tensor, ids: Tensor) -> Tensor:
    """Keys [N, ids] whose largest is the expected token's, where there is one."""
    asked = expected[:, None]
    here = torch.where(asked == ids, 0.0, -torch.inf).to(keys.dtype)
    return torch.where(asked >= 0, here, keys)


def keep_top(logits: Tensor, top_p: float, top_k: int) -> Tensor:
    """top-p, then top-k: everything else becomes −inf. The most likely token always stays.

    Of equals the lower ids stay, so that top_k = 1 is greedy where bf16 logits tie.
    """
    if top_p == 1.0 and top_k == 0:
        return logits
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    dropped = torch.zeros_like(order, dtype=torch.bool)
    if top_p < 1.0:
        dropped[:, 1:] = torch.softmax(ordered, dim=-1).cumsum(dim=-1)[:, :-1] > top_p
    if top_k > 0:
        dropped[:, top_k:] = True
    return logits.masked_fill(dropped.scatter(-1, order, dropped), -torch.inf)


def gumbel(positions: Tensor, seed: int, ids: Tensor) -> Tensor:
    """[N, ids] Gumbel noise: the argmax of logits + noise is a sample of their softmax."""
    row = _mix(_mix(positions * 0x9E3779B1 + 1) ^ seed)  # + 1: _mix(0) is 0
    bits = _mix(row[:, None] + ids[None, :] * 0x2545F4914F6CDD1D)
    uniform = ((bits >> 11) & ((1 << 52) - 1)).double().add_(0.5).mul_(2.0**-52)
    return -torch.log(-torch.log(uniform)).float()


def _mix(x: Tensor) -> Tensor:
    """Finaliser of splitmix64 on int64, whose overflow wraps on every device."""
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * -0x40A7B892E31B1A47
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * -0x6B2FB644ECCEEE15
    return x ^ ((x >> 31) & ((1 << 33) - 1))
