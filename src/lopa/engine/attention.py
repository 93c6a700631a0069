"""Attention over explicit keys and values, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """q [R, L, heads, d], k and v [R, S, kv_heads, d], mask [R or 1, L, S] (True: sees).

    Grouped heads: query head h reads key head h // (heads / kv_heads). Softmax in fp32.
    Every query must see at least one key.
    """
    rows, length, heads, dim = q.shape
    groups = heads // k.shape[2]
    grouped = q.reshape(rows, length, k.shape[2], groups, dim)
    scores = torch.einsum("rlkgd,rskd->rkgls", grouped, k).float() * dim**-0.5
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None, None], -torch.inf)
    weights = torch.softmax(scores, dim=-1).to(v.dtype)
    return torch.einsum("rkgls,rskd->rlkgd", weights, v).reshape(rows, length, heads, dim)
