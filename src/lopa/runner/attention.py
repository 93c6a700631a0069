"""Attention on any device: `reference`, as the equation says, and `sdpa`, by torch's kernels.

Two shapes. Over explicit keys (`reference`, `sdpa`): q [R, L, heads, d], k and v [R, S, kv_heads,
d], mask [R or 1, L, S] (True: sees). Over a batch (`reference_batch`, `sdpa_batch`; the Triton
kernel is `lopa.kernels.triton.attention`): q, k, v [T, …] on the flat token axis, where each row
attends to its sequence's pages and its own window. The pages are read once for all rows of a
sequence: rows and the query group are folded into one query axis, and the two parts are merged by
their log-sum-exp. Query head h reads key head h // (heads / kv_heads).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

# None of them writes out [T, T].
_WHOLE_BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]


def reference(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """As the equation says, with the softmax in fp32. Every query must see at least one key."""
    rows, length, heads, dim = q.shape
    groups = heads // k.shape[2]
    grouped = q.reshape(rows, length, k.shape[2], groups, dim)
    scores = torch.einsum("rlkgd,rskd->rkgls", grouped, k).float() * dim**-0.5
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None, None], -torch.inf)
    weights = torch.softmax(scores, dim=-1).to(v.dtype)
    return torch.einsum("rkgls,rskd->rlkgd", weights, v).reshape(rows, length, heads, dim)


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """torch picks the kernel; on a CPU a round takes a quarter less time than by `reference`."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    seen = None if mask is None else mask[:, None]
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
    return mixed.transpose(1, 2)


def attend_whole(q: Tensor, k: Tensor, v: Tensor, tokens: int) -> Tensor:
    """Of one row whose tokens all see each other and nothing else; what is behind them is padding.

    q [T, heads, d], k and v [T, kv_heads, d]. For a long prompt: on a GPU by cuDNN, which is more
    than twice as fast as the kernel of rounds (measurements/prefill_attention.py).
    """
    out = q.new_zeros(q.shape)
    q, k, v = (x[None, :tokens] for x in (q, k, v))
    with sdpa_kernel(_WHOLE_BACKENDS, set_priority=True) if q.is_cuda else nullcontext():
        out[:tokens] = sdpa(q, k, v, None)[0]
    return out


@dataclass(slots=True)
class Span:
    """The rows of one plan on the flat token axis."""

    begin: int
    lengths: list[int]  # by row
    prefix: Tensor  # [P] slot mapping of the cached tokens that every row attends to
    blocks: Tensor | None  # [longest row] block of each token under block attention

    def window_mask(self, length: int) -> Tensor | None:
        if self.blocks is None:
            return None
        ids = self.blocks[:length]
        return ids[None, :] <= ids[:, None]


# (q [T, heads, d], k, v [T, kv_heads, d], keys, values of the cache [S, kv_heads, d], spans)
# → [T, heads, d]
BatchAttention = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Sequence[Span]], Tensor]


def reference_batch(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, spans: Sequence[Span]
) -> Tensor:
    out = torch.empty_like(q)
    for span in spans:
        at = span.begin
        for length in span.lengths:
            row = slice(at, at := at + length)
            mask = span.window_mask(length)
            if mask is not None:
                seen = torch.ones(length, len(span.prefix), dtype=torch.bool, device=q.device)
                mask = torch.cat([seen, mask], dim=1)[None]
            all_keys = torch.cat([keys[span.prefix], k[row]])[None]
            all_values = torch.cat([values[span.prefix], v[row]])[None]
            out[row] = reference(q[row][None], all_keys, all_values, mask)[0]
    return out


def sdpa_batch(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, spans: Sequence[Span]
) -> Tensor:
    tokens, heads, dim = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    folded = q.view(tokens, kv_heads, group, dim)
    out = torch.empty_like(folded)
    for span in spans:
        at = span.begin
        every = slice(at, at + sum(span.lengths))
        # [1, kv_heads, tokens · group, d] against [1, kv_heads, P, d]
        shared = None
        if len(span.prefix):
            queries = folded[every].transpose(0, 1).reshape(1, kv_heads, -1, dim)
            shared_k = keys[span.prefix].transpose(0, 1)[None]
            shared_v = values[span.prefix].transpose(0, 1)[None]
            mixed, lse = _with_lse(queries, shared_k, shared_v, None)
            shared = mixed[0].view(kv_heads, -1, group, dim), lse[0].view(kv_heads, -1, group)
        for length, same in groupby(span.lengths):
            rows = len(list(same))
            here = slice(at, at := at + rows * length)
            # [rows, kv_heads, length · group, d] against [rows, kv_heads, length, d]
            queries = folded[here].view(rows, length, kv_heads, group, dim).transpose(1, 2)
            own_k = k[here].view(rows, length, kv_heads, dim).transpose(1, 2)
            own_v = v[here].view(rows, length, kv_heads, dim).transpose(1, 2)
            mask = span.window_mask(length)
            if mask is not None:
                mask = mask.repeat_interleave(group, dim=0)
            queries = queries.reshape(rows, kv_heads, length * group, dim)
            mixed, lse = _with_lse(queries, own_k, own_v, mask)
            mixed = mixed.view(rows, kv_heads, length, group, dim)
            if shared is not None:
                inside = slice(here.start - every.start, here.stop - every.start)
                other = shared[0][:, inside].view(kv_heads, rows, length, group, dim)
                other_lse = shared[1][:, inside].view(kv_heads, rows, length, group)
                lse = lse.view(rows, kv_heads, length, group)
                share = torch.sigmoid(other_lse.transpose(0, 1) - lse)[..., None].to(mixed.dtype)
                mixed = torch.lerp(mixed, other.transpose(0, 1), share)
            out[here] = mixed.transpose(1, 2).reshape(-1, kv_heads, group, dim)
    return out.view(tokens, heads, dim)


def _with_lse(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """The mixture [R, H, L, d] and the log-sum-exp of the scores [R, H, L] in fp32."""
    if q.device.type == "cpu":
        seen = None  # added to the scores: 0 or −inf
        if mask is not None:
            seen = torch.zeros(mask.shape, dtype=q.dtype).masked_fill_(~mask, -torch.inf)[
                None, None
            ]
        mixed, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, attn_mask=seen
        )
        return mixed, lse
    scores = (q @ k.transpose(-1, -2)).float() * q.shape[-1] ** -0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    return torch.exp(scores - lse[..., None]).to(v.dtype) @ v, lse
