"""The training loss: the transformer over a batch packed on its flat token axis."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lopa.models.config import ModelConfig
from lopa.models.transformer import Transformer


def initialise(model: Transformer, generator: torch.Generator) -> None:
    """Small normal weights; what writes to the residual stream is scaled down with the depth."""
    depth = (2 * model.config.layers) ** -0.5
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
            elif parameter.dim() == 1:
                parameter.zero_()
            else:
                scale = depth if name.endswith(("out.weight", "down.weight")) else 1.0
                parameter.normal_(0.0, 0.02 * scale, generator=generator)


def hidden_states(model: Transformer, tokens: Tensor, bias: Tensor) -> Tensor:
    """[N, L, hidden] of tokens [N, L] under an additive attention bias [N, 1, L, L]."""
    rows, length = tokens.shape
    config: ModelConfig = model.config
    groups = config.heads // config.kv_heads

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.view(rows, length, -1, config.head_dim).transpose(1, 2) for x in (q, k, v))
        # Repeated heads instead of enable_gqa: with a bias, the fast kernels take no groups.
        k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
        # Autocast casts what it is given; the bias has to follow.
        q, k, v = (x.to(bias.dtype) for x in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return mixed.transpose(1, 2).reshape(rows * length, config.heads, config.head_dim)

    positions = torch.arange(length, device=tokens.device).repeat(rows)
    hidden: Tensor = model(tokens.reshape(-1), positions, attend)
    return hidden.view(rows, length, -1)


def attention_bias(sees: Tensor, dtype: torch.dtype) -> Tensor:
    """[N, 1, L, L]: zero where a query sees a key, minus infinity elsewhere."""
    bias = torch.zeros(sees.shape, dtype=dtype, device=sees.device)
    return bias.masked_fill_(~sees, -torch.inf)[:, None]


def token_losses(model: Transformer, tokens: Tensor, targets: Tensor, bias: Tensor) -> Tensor:
    """[N, L − 1] cross-entropy of positions 1 … L − 1, each from the row before it."""
    hidden = hidden_states(model, tokens, bias)
    logits = model.logits(hidden[:, :-1].flatten(0, 1)).float()
    losses = F.cross_entropy(logits, targets[:, 1:].flatten(), reduction="none")
    return losses.view(len(tokens), -1)


def weighted_sum(
    model: Transformer, tokens: Tensor, targets: Tensor, weights: Tensor, bias: Tensor
) -> Tensor:
    """Sum of the masked positions' losses by their weights; position 0 is always prompt."""
    return (token_losses(model, tokens, targets, bias) * weights[:, 1:]).sum()
