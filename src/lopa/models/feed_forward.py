"""The plain feed-forward: SwiGLU with gate and up merged."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Where(NamedTuple):
    """Where and in which precision parameters are made."""

    device: torch.device | None = None
    dtype: torch.dtype | None = None


class Linear(nn.Linear):
    def reset_parameters(self) -> None:
        """Left unwritten: a checkpoint or an initialiser writes every weight."""


class FeedForward(nn.Module):
    def __init__(self, hidden: int, inner: int, where: Where) -> None:
        super().__init__()
        self.gate_up = Linear(hidden, 2 * inner, bias=False, **where._asdict())
        self.down = Linear(inner, hidden, bias=False, **where._asdict())

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        out: Tensor = self.down(F.silu(gate) * up)
        return out
