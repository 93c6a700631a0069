"""The least that a round has to read and to compute: its floor on a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from lopa.models.config import ModelConfig
from lopa.models.mixture import Router
from lopa.models.transformer import Transformer
from lopa.runner.kv_cache import token_bytes


@dataclass(frozen=True, slots=True)
class RoundWork:
    """Each byte is read once and each product done once, attention included."""

    bytes: float  # weights, and keys and values
    flops: float  # in the model's dtype
    quantised_flops: float  # in the linear layers' own

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        dtype: torch.dtype,
        *,
        rows: int,
        window: int,  # tokens per row
        prefix: int,  # cached tokens, which all rows share
        touched: float | None = None,  # experts per layer that are read; None: by even routing
        is_quantised: bool = False,
    ) -> Self:
        tokens, size = rows * window, 1 if is_quantised else dtype.itemsize
        read = used = 0.0  # parameters of layers
        for layer in range(config.layers):
            dense, mixture = config.layer_parameters(layer), config.mixture_of(layer)
            if mixture is not None:
                expert = 3 * config.hidden_size * mixture.inner
                dense -= mixture.experts * expert
                share = mixture.per_token / mixture.experts
                spread = mixture.experts * (1 - (1 - share) ** tokens)
                read += (spread if touched is None else touched) * expert
                used += mixture.per_token * expert
            read, used = read + dense, used + dense
        head = config.vocab_size * config.hidden_size
        cached = (prefix + tokens) * token_bytes(config, dtype)
        attention = 4 * tokens * (prefix + window) * config.heads * config.head_dim * config.layers
        linear, rest = 2 * tokens * used, 2 * tokens * head + attention
        return cls(
            bytes=read * size + head * dtype.itemsize + cached,
            flops=rest if is_quantised else rest + linear,
            quantised_flops=linear if is_quantised else 0.0,
        )


class TouchedExperts:
    """How many experts of a layer the last forward read, the mean over layers with a mixture."""

    def __init__(self, model: Transformer, backend: Any) -> None:
        self._experts = model.config.mixture.experts if model.config.mixture else 0
        # Kernels count by themselves; in plain torch the routers are asked.
        self._counts: dict[int, Tensor] = getattr(backend, "expert_counts", {})
        self._chosen: dict[int, Tensor] = {}
        self._hooks = []
        if not self._counts:
            routers = [module for module in model.modules() if isinstance(module, Router)]
            for index, router in enumerate(routers):
                self._hooks.append(router.register_forward_hook(self._observer(index)))

    def _observer(self, index: int) -> Any:
        def observe(_router: Router, _inputs: object, out: tuple[Tensor, Tensor]) -> None:
            self._chosen[index] = out[0]

        return observe

    def take(self) -> float | None:
        """None where there is no mixture, or where its layers run elsewhere."""
        found = [int((count[: self._experts] > 0).sum()) for count in self._counts.values()]
        found += [int((torch.bincount(c.flatten()) > 0).sum()) for c in self._chosen.values()]
        return sum(found) / len(found) if found else None

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
