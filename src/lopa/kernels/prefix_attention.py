"""Attention of a round to the far part of a long prefix, by cuDNN.

cuDNN is faster than the kernel of rounds (docs/results.md), but takes no pages: those of the far
part are first made contiguous. The part is cut into chunks, a batch of its own, so that few queries
fill the device too. The kernel of rounds attends to what is nearer, and merges all by their
log-sum-exp.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lopa.kernels import PAGE, compilation

CHUNK = 4096  # tokens; the far part is a multiple of it
_SHORTEST_PREFIX = 4 * CHUNK  # behind less, and for fewer queries, the copy costs what is won
_FEWEST_TOKENS = 128
_HALF = torch.bfloat16, torch.float16


class FarPart(NamedTuple):
    mixed: Tensor  # [chunks, T, heads, D]
    lse: Tensor  # [chunks, heads, T] in fp32, natural

    @property
    def pages(self) -> int:
        return len(self.mixed) * (CHUNK // PAGE)


def is_faster(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Where cuDNN has this attention, and it was measured to be faster."""
    if device.type != "cuda" or dtype not in _HALF or head_dim not in (64, 128):
        return False
    is_hopper = torch.cuda.get_device_capability(device)[0] == 9
    return is_hopper and torch.backends.cudnn.is_available()  # type: ignore[no-untyped-call]


def far_tokens(prefix: int, tokens: int) -> int:
    """How much of a prefix that all tokens see is left to cuDNN."""
    if prefix < _SHORTEST_PREFIX or tokens < _FEWEST_TOKENS:
        return 0
    return prefix // CHUNK * CHUNK


def attend_far(
    q: Tensor,  # [T, heads, D]
    cache_k: Tensor,  # [S, kv_heads, D], contiguous
    cache_v: Tensor,
    pages: Tensor,  # of the far part
) -> FarPart:
    """All tokens see the whole part."""
    tokens, heads, dim = q.shape
    chunks = len(pages) * PAGE // CHUNK
    if compilation.is_noting():
        mixed = q.new_empty(chunks, tokens, heads, dim)
        return FarPart(mixed, mixed.new_empty(chunks, heads, tokens, dtype=torch.float32))
    k, v = (
        cache.view(-1, PAGE, *cache.shape[1:])
        .index_select(0, pages)
        .view(chunks, CHUNK, -1, dim)
        .transpose(1, 2)
        for cache in (cache_k, cache_v)
    )
    mixed, lse = _with_lse(q.transpose(0, 1).expand(chunks, -1, -1, -1), k, v)
    # As cuDNN lays them out: nothing is copied.
    return FarPart(mixed.transpose(1, 2).contiguous(), lse.view(chunks, heads, tokens))


def _with_lse(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """[chunks, heads, T, D], and the log-sum-exp [chunks, heads, T, 1]."""
    found = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True)
    return found[0], found[1]
