"""The feed-forward of a mixture: a router, the experts it chooses from, and a shared one.

`Experts` is the part that a kernel may take over: it gets tokens, chosen experts and weights, and
everything else stays. Its products are in the model's precision, its sums in fp32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lopa.models.config import MixtureConfig
from lopa.models.feed_forward import FeedForward, Where

_TINY = 1e-20  # so that weights of nothing but zeros can be divided by their sum


class Mixture(nn.Module):
    def __init__(self, config: MixtureConfig, hidden: int, where: Where) -> None:
        super().__init__()
        self.router = Router(config, hidden, where)
        self.experts = Experts(config, hidden, where)
        self.shared = FeedForward(hidden, config.shared, where) if config.shared else None

    def forward(self, x: Tensor) -> Tensor:
        """[T, hidden] → [T, hidden]"""
        out: Tensor = self.experts(x, *self.router(x))
        return out if self.shared is None else out + self.shared(x)


class Router(nn.Module):
    """Chooses the experts of each token. It computes in fp32, whatever the model's precision."""

    def __init__(self, config: MixtureConfig, hidden: int, where: Where) -> None:
        super().__init__()
        self.config = config
        self.dtype = wide(where.dtype or torch.get_default_dtype())
        self.weight = nn.Parameter(
            torch.empty(config.experts, hidden, device=where.device, dtype=self.dtype)
        )
        self.bias: nn.Parameter | None = None
        if config.bias:
            self.bias = nn.Parameter(
                torch.empty(config.experts, device=where.device, dtype=self.dtype)
            )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[T, hidden] → chosen experts [T, k], the best first, and their weights [T, k]."""
        config = self.config
        levels = F.linear(x.to(self.dtype), self.weight)
        scores = levels.sigmoid() if config.scoring == "sigmoid" else levels.softmax(dim=-1)
        ranked = scores if self.bias is None else scores + self.bias
        if config.groups > 1:
            ranked = _best_groups(ranked, config.groups, config.top_groups)
        chosen = ranked.topk(config.per_token, dim=-1).indices
        weights = scores.gather(-1, chosen)
        if config.renormalise:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + _TINY)
        return chosen, weights * config.scale


def _best_groups(ranked: Tensor, groups: int, kept: int) -> Tensor:
    """−inf outside the groups whose two best experts have the largest sum."""
    grouped = ranked.view(len(ranked), groups, -1)
    best = grouped.topk(2, dim=-1).values.sum(dim=-1).topk(kept, dim=-1).indices
    dropped = torch.ones(grouped.shape[:2], dtype=torch.bool, device=ranked.device)
    dropped.scatter_(1, best, False)
    return grouped.masked_fill(dropped[:, :, None], -torch.inf).view_as(ranked)


class Experts(nn.Module):
    """Every expert's SwiGLU: gate and up merged, experts stacked."""

    def __init__(self, config: MixtureConfig, hidden: int, where: Where) -> None:
        super().__init__()
        count, inner = config.experts, config.inner
        self.gate_up = nn.Parameter(torch.empty(count, 2 * inner, hidden, **where._asdict()))
        self.down = nn.Parameter(torch.empty(count, hidden, inner, **where._asdict()))

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """x [T, hidden], chosen and weights [T, k] → [T, hidden]: the weighted sum of k experts.

        Tokens are grouped by expert, so that each expert is read once.
        """
        count, k = chosen.shape
        order = chosen.view(-1).argsort(stable=True)  # places in [T · k], by expert
        sizes = torch.bincount(chosen.view(-1), minlength=len(self.gate_up)).tolist()
        rows = x[order // k]
        found = torch.empty(count * k, x.shape[1], device=x.device, dtype=x.dtype)
        end = 0
        for expert, size in enumerate(sizes):
            if size:
                here = slice(end, end := end + size)
                gate, up = F.linear(rows[here], self.gate_up[expert]).chunk(2, dim=-1)
                found[order[here]] = F.linear(F.silu(gate) * up, self.down[expert])
        each = found.view(count, k, -1).to(weights.dtype)
        return (each * weights[:, :, None]).sum(dim=1).to(x.dtype)


def wide(dtype: torch.dtype) -> torch.dtype:
    """fp32, or what is wider."""
    return torch.promote_types(dtype, torch.float32)
