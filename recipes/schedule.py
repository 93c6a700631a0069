"""The optimiser and its learning rate, which follows the clock and not the number of steps."""

from __future__ import annotations

import torch

from lopa.errors import ConfigError
from lopa.models.transformer import Transformer
from recipes.settings import Optim


def factor(step: int, spent: float, optim: Optim) -> float:
    """Share of the peak rate at a step, with `spent` of the budget (0 … 1) gone.

    Rises over the first steps, stays, and falls in a straight line to zero at the end of the
    budget, whatever the throughput was.
    """
    rise = min(1.0, (step + 1) / max(1, optim.warmup))
    fall = min(1.0, max(0.0, 1.0 - spent) / max(1e-9, optim.cooldown))
    return rise * fall


def optimizers(model: Transformer, optim: Optim) -> list[torch.optim.Optimizer]:
    """Each parameter group keeps its peak rate as `peak`."""
    inner, matrices, vectors = [], [], []
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            vectors.append(parameter)
        elif optim.optimizer == "muon" and name.startswith("layers."):
            inner.append(parameter)
        else:
            matrices.append(parameter)
    fused = next(model.parameters()).device.type == "cuda"
    found: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": optim.weight_decay, "peak": optim.lr},
                {"params": vectors, "weight_decay": 0.0, "peak": optim.lr},
            ],
            lr=optim.lr,
            betas=(optim.betas[0], optim.betas[1]),
            fused=fused,
        )
    ]
    if inner:
        found.append(
            torch.optim.Muon(
                [{"params": inner, "peak": optim.muon_lr}],
                lr=optim.muon_lr,
                momentum=0.95,
                weight_decay=optim.weight_decay,
                adjust_lr_fn="match_rms_adamw",  # rates of AdamW's size
            )
        )
    elif optim.optimizer != "adamw":
        raise ConfigError(f"optim.optimizer must be adamw or muon: got {optim.optimizer!r}")
    return found


def set_rate(found: list[torch.optim.Optimizer], share: float) -> None:
    for optimizer in found:
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * share
