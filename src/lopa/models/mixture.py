"""The feed-forward of a mixture: a router, the experts it chooses from, and a shared one.

Plain torch, on any device; `lopa.kernels.fast_mixture` does the same in kernels. The products of
`Experts` are in the model's precision, its weighted sums in fp32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lopa.models.config import MixtureConfig
from lopa.models.feed_forward import FeedForward, Where

_TINY = 1e-20  # so that weights of nothing but zeros can be divided by their sum


class Mixture(nn.Module):
    """A shared expert as wide as the others is stored behind them: a kernel may count it as one."""

    def __init__(self, config: MixtureConfig, hidden: int, where: Where) -> None:
        super().__init__()
        is_like_the_others = config.shared == config.inner
        self.router = Router(config, hidden, where)
        self.experts = Experts(config, hidden, where, spare=int(is_like_the_others))
        self.shared: nn.Module | None = None
        if config.shared:
            nowhere = where._replace(device=torch.device("meta"))
            shared = FeedForward(hidden, config.shared, nowhere if is_like_the_others else where)
            if is_like_the_others:
                gate_up, down = self.experts.stacks
                shared.gate_up.weight = nn.Parameter(gate_up[-1])
                shared.down.weight = nn.Parameter(down[-1])
            self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        """[T, hidden] → [T, hidden]"""
        out: Tensor = self.experts(x, *self.router(x))
        return out if self.shared is None else out + self.shared(x)


class Router(nn.Module):
    """Chooses the experts of each token. It computes in fp32, whatever the model's precision.

    Of experts, and of groups, with the same score the lower one is chosen.
    """

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
        chosen = _best(ranked, config.per_token)
        weights = scores.gather(-1, chosen)
        if config.renormalise:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + _TINY)
        return chosen, weights * config.scale


def _best(scores: Tensor, count: int) -> Tensor:
    """Where the largest are, in the last axis: `topk` leaves open which of several equal ones."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count].contiguous()


def _best_groups(ranked: Tensor, groups: int, kept: int) -> Tensor:
    """−inf outside the groups whose two best experts have the largest sum."""
    grouped = ranked.view(len(ranked), groups, -1)
    best = _best(grouped.topk(2, dim=-1).values.sum(dim=-1), kept)
    dropped = torch.ones(grouped.shape[:2], dtype=torch.bool, device=ranked.device)
    dropped.scatter_(1, best, False)
    return grouped.masked_fill(dropped[:, :, None], -torch.inf).view_as(ranked)


class Experts(nn.Module):
    """Every expert's SwiGLU: gate and up merged, experts stacked."""

    def __init__(self, config: MixtureConfig, hidden: int, where: Where, spare: int = 0) -> None:
        """spare: experts more in the stacks, which no token is sent to."""
        super().__init__()
        self.count, inner = config.experts, config.inner
        self.stacks = (
            torch.empty(self.count + spare, 2 * inner, hidden, **where._asdict()),
            torch.empty(self.count + spare, hidden, inner, **where._asdict()),
        )
        self.gate_up, self.down = (nn.Parameter(stack[: self.count]) for stack in self.stacks)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """x [T, hidden], chosen and weights [T, k] → [T, hidden]: the weighted sum of k experts.

        Tokens are grouped by expert, so that each expert is read once.
        """
        count, k = chosen.shape
        order = chosen.view(-1).argsort(stable=True)  # places in [T · k], by expert
        sizes = torch.bincount(chosen.view(-1), minlength=self.count).tolist()
        rows = x[order // k]
        found = torch.empty(count * k, x.shape[1], device=x.device, dtype=x.dtype)
        end = 0
        for expert, size in enumerate(sizes):
            if size:
                here = slice(end, end := end + size)
                found[order[here]] = self.run(expert, rows[here])
        each = found.view(count, k, -1).to(weights.dtype)
        return (each * weights[:, :, None]).sum(dim=1).to(x.dtype)

    def run(self, expert: int, x: Tensor) -> Tensor:
        """One expert on all of x, [T, hidden] → [T, hidden]."""
        gate, up = F.linear(x, self.gate_up[expert]).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.down[expert])


def wide(dtype: torch.dtype) -> torch.dtype:
    """fp32, or what is wider."""
    return torch.promote_types(dtype, torch.float32)
