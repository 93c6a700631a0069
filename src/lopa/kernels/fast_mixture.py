"""The feed-forward of a mixture in kernels: route, group by expert, two products.

A shared expert as wide as the others is one of them that every token goes to. Another width goes by
the products of a plain feed-forward. The weighted sum is left to the norm that follows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lopa.kernels.fast_linear import linear, swiglu
from lopa.kernels.quantize import QuantizedExperts
from lopa.kernels.scaled import Scaled
from lopa.kernels.triton import experts as products
from lopa.kernels.triton.pointwise import Weighted
from lopa.kernels.triton.routing import group, route, tile_size
from lopa.models.feed_forward import FeedForward
from lopa.models.mixture import Mixture


def experts_dtype(layer: Mixture) -> torch.dtype | None:
    """What the input of its experts is quantized to; None: nothing."""
    experts = layer.experts
    return experts.kind if isinstance(experts, QuantizedExperts) else None


def mixture(
    layer: Mixture,
    x: Tensor,  # [T, hidden]
    scaled: Scaled | None,  # the same, where the experts are quantized
    used: Tensor,  # [1] int32: tokens that are not padding
    counts: Tensor,  # [experts] int32, written: how many tokens each gets
) -> Weighted:
    router, experts = layer.router, layer.experts
    gate_up, down = experts.stacks
    scales: tuple[Tensor, Tensor] | tuple[None, None] = (None, None)
    if isinstance(experts, QuantizedExperts):
        scales = experts.scales
    count, hidden = gate_up.shape[0], gate_up.shape[2]
    chosen, weights = route(x, router.weight, router.bias, router.config, used, nowhere=count)
    tokens, choices = chosen.shape
    tiles = group(chosen, count, tile_size(chosen.numel(), count), counts)
    given = x if scaled is None else scaled
    active = products.gate_up(given, gate_up, scales[0], tiles, choices)
    found = torch.empty(tokens, choices, hidden, dtype=x.dtype, device=x.device)
    products.down(active, down, scales[1], tiles, found.view(-1, hidden))
    if layer.shared is not None and count == experts.count:
        assert isinstance(layer.shared, FeedForward)
        found[:, -1] = linear(layer.shared.down, swiglu(layer.shared, given))
    return Weighted(found, weights)
