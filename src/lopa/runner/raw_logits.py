"""Logits of one sequence, without a cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lopa.config import AttentionName
from lopa.models.transformer import Transformer
from lopa.runner.attention import sdpa


@torch.inference_mode()
def raw_logits(
    model: Transformer,
    token_ids: Sequence[int],
    kind: AttentionName = "full",
    prompt_len: int = 0,
    block_size: int = 1,
) -> Tensor:
    """[T, vocab] raw rows of one sequence without a cache, in fp32."""
    device = next(model.parameters()).device
    tokens = torch.tensor(token_ids, dtype=torch.int64, device=device)
    positions = torch.arange(len(tokens), device=device)
    mask = None
    if kind == "block":
        blocks = torch.where(positions < prompt_len, -1, (positions - prompt_len) // block_size)
        if model.config.trained_block is not None:  # counted from position 0
            blocks = positions // block_size
        mask = (blocks[None, :] <= blocks[:, None])[None]

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(q[None], k[None], v[None], mask)[0]

    return model.logits(model(tokens, positions, attend)).float()
