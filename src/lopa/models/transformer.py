"""One transformer for all families: pre-norm, RMSNorm, RoPE, grouped heads, SwiGLU or experts.

Works on a flat token axis: it does not know which tokens belong to which row or sequence. Only
the `attend` function that the caller passes in does, and it is also where keys and values are
cached. QKV and gate/up are merged; checkpoints with separate weights are joined when loaded.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lopa.models.config import ModelConfig
from lopa.models.feed_forward import FeedForward, Linear, Where
from lopa.models.mixture import Mixture
from lopa.models.part import WHOLE, Part

# (layer, q [T, heads, d], k [T, kv_heads, d], v [T, kv_heads, d]) → [T, heads, d]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
# In place, over the ranks that hold the parts of a model
SumParts = Callable[[Tensor], Tensor]


def nothing_to_sum(x: Tensor) -> Tensor:
    """The `SumParts` of a whole model."""
    return x


class Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        """Left unwritten, as in `Linear`."""


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float, where: Where) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, device=where.device, dtype=where.dtype))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, where: Where) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        width = config.heads * config.head_dim
        merged = width + 2 * config.kv_heads * config.head_dim
        self.qkv = Linear(config.hidden_size, merged, bias=config.qkv_bias, **where._asdict())
        self.out = Linear(width, config.hidden_size, bias=False, **where._asdict())
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.norm_eps, where)
            self.k_norm = RMSNorm(config.head_dim, config.norm_eps, where)
        self.qk_norm = config.qk_norm

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, layer: int, attend: Attend) -> Tensor:
        count = x.shape[0]
        q, k, v = (
            self.qkv(x)
            .view(count, -1, self.head_dim)
            .split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        )
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        mixed = attend(layer, _rotate(q, cos, sin), _rotate(k, cos, sin), v)
        out: Tensor = self.out(mixed.reshape(count, -1))
        return out


class Layer(nn.Module):
    def __init__(self, config: ModelConfig, index: int, where: Where) -> None:
        super().__init__()
        hidden, mixture = config.hidden_size, config.mixture_of(index)
        self.attention_norm = RMSNorm(hidden, config.norm_eps, where)
        self.attention = Attention(config, where)
        self.feed_forward_norm = RMSNorm(hidden, config.norm_eps, where)
        self.feed_forward: FeedForward | Mixture = (
            FeedForward(hidden, config.intermediate_size, where)
            if mixture is None
            else Mixture(mixture, hidden, where)
        )
        self.sum_parts: SumParts = nothing_to_sum

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, layer: int, attend: Attend) -> Tensor:
        mixed = self.attention(self.attention_norm(x), cos, sin, layer, attend)
        x = x + self.sum_parts(mixed)
        return x + self.sum_parts(self.feed_forward(self.feed_forward_norm(x)))


class Transformer(nn.Module):
    """Made with unwritten weights: see `lopa.models.checkpoint` for what writes them."""

    def __init__(
        self,
        config: ModelConfig,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        *,
        with_layers: bool = True,  # False: they are left to be appended
    ) -> None:
        super().__init__()
        where = Where(device, dtype)
        self.config = config
        # Set by a rank that holds a part of the model
        self.part: Part = WHOLE
        self.sum_parts: SumParts = nothing_to_sum
        self.embedding = Embedding(config.vocab_size, config.hidden_size, **where._asdict())
        count = config.layers if with_layers else 0
        self.layers = nn.ModuleList(Layer(config, i, where) for i in range(count))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, where)
        if not config.tied_head:
            self.head = Linear(config.hidden_size, config.vocab_size, bias=False, **where._asdict())

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """tokens, positions: [T]. Returns the normed hidden states [T, hidden]: see `logits`."""
        x = self.embedding(tokens)
        cos, sin = rope(positions, self.config, x.dtype)
        for index, layer in enumerate(self.layers):
            x = layer(x, cos, sin, index, attend)
        out: Tensor = self.norm(x)
        return out

    @property
    def head_weight(self) -> Tensor:
        """[vocab, hidden]"""
        weight: Tensor = self.embedding.weight if self.config.tied_head else self.head.weight
        return weight

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] → [N, vocab]: the raw rows, not shifted."""
        return F.linear(hidden, self.head_weight)


def rope(positions: Tensor, config: ModelConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos, sin: [T, 1, rotary size], computed in fp32."""
    size = config.rotary_size
    half = torch.arange(0, size, 2, device=positions.device, dtype=torch.float32)
    frequencies = 1.0 / config.rope_theta ** (half / size)
    angles = positions.float()[:, None] * frequencies
    angles = torch.cat([angles, angles], dim=-1)[:, None, :]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the first numbers of each head, as many as cos has; the rest passes."""
    size = cos.shape[-1]
    if size < x.shape[-1]:
        return torch.cat([_rotate(x[..., :size], cos, sin), x[..., size:]], dim=-1)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
