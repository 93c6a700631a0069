"""The layers of a model in kernels, over a paged KV cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from lopa.kernels import prefix_attention
from lopa.kernels.fast_linear import input_dtype, linear, swiglu
from lopa.kernels.fast_mixture import experts_dtype, mixture
from lopa.kernels.scaled import Scaled
from lopa.kernels.triton import pointwise
from lopa.kernels.triton.attention import attend
from lopa.kernels.triton.pointwise import Weighted
from lopa.models.mixture import Mixture
from lopa.models.transformer import Layer, RMSNorm, Transformer, rope
from lopa.runner import graph_inputs
from lopa.runner.attention import attend_whole
from lopa.runner.graph_inputs import LayerInputs
from lopa.runner.kv_cache import PAGE, KVCache


class FusedLayers:
    """Of a part of a model too: what its kernels find is summed over the ranks."""

    def __init__(self, model: Transformer, kv_cache: KVCache, longest: int) -> None:
        """longest: tokens of a sequence."""
        self.model = model
        self.kv_cache = kv_cache
        device, dtype = kv_cache.keys.device, kv_cache.keys.dtype
        cos, sin = rope(torch.arange(longest, device=device), model.config, dtype)
        self._cos, self._sin = cos[:, 0].contiguous(), sin[:, 0].contiguous()
        # Of the last forward: tokens that went to each expert
        self.expert_counts: dict[int, Tensor] = {
            index: torch.zeros(
                len(layer.feed_forward.experts.stacks[0]), dtype=torch.int32, device=device
            )
            for index, layer in enumerate(model.layers)
            if isinstance(layer.feed_forward, Mixture)
        }

    def run(
        self,
        inputs: LayerInputs[Tensor],
        table: Tensor,  # [slots, pages] int32: where the sequence of a slot is in the KV cache
        stage: Callable[[int], tuple[Tensor, Tensor]],
        whole: int | None = None,
        only: Sequence[int] | None = None,
        far: int = 0,
    ) -> Iterator[Tensor]:
        """The residual stream after each layer, then the normed hidden states.

        stage: where the keys and values of a layer go. whole: tokens of one row that all see each
        other and nothing else, without the padding. only: these layers. far: tokens of the prefix
        that are left to cuDNN, if all rows are of one sequence.
        """
        config, sum_parts = self.model.config, self.model.sum_parts
        count, heads, dim = len(inputs.tokens), config.heads, config.head_dim
        rows = graph_inputs.attention_rows(inputs, table)
        pages = rows.table[:, : far // PAGE].index_select(0, rows.slot[:1])[0] if far else None
        cos, sin = self._cos[inputs.positions], self._sin[inputs.positions]
        x = self.model.embedding(inputs.tokens)
        layers: list[Layer] = list(self.model.layers)  # type: ignore[arg-type]
        indices = range(len(layers)) if only is None else only
        # Each norm and the layer that reads it
        norms = [(layers[i].attention_norm, layers[i].attention.qkv) for i in indices]
        h = _norm(x, None, *norms[0])
        out: Tensor | Weighted
        for number, index in enumerate(indices, 1):
            layer = layers[index]
            attention, feed_forward = layer.attention, layer.feed_forward
            qkv = linear(attention.qkv, h)
            keys, values = stage(index)
            weights = None
            if config.qk_norm:
                weights = attention.q_norm.weight, attention.k_norm.weight
            pointwise.rotate(qkv, cos, sin, weights, config.norm_eps, keys, values, heads)
            q = qkv.view(count, -1, dim)[:, :heads]
            cache = self.kv_cache.keys[index], self.kv_cache.values[index]
            if whole is None:
                part = None if pages is None else prefix_attention.attend_far(q, *cache, pages)
                mixed = attend(q, keys, values, *cache, rows, far=part)
            else:
                mixed = attend_whole(q, keys, values, whole)
            out = sum_parts(linear(attention.out, mixed.view(count, heads * dim)))
            if isinstance(feed_forward, Mixture):
                given = _norm_for_experts(x, out, layer.feed_forward_norm, feed_forward)
                out = mixture(feed_forward, *given, inputs.used, self.expert_counts[index])
                if self.model.part.count > 1:
                    out = sum_parts(pointwise.weighted_sum(out))
            else:
                h = _norm(x, out, layer.feed_forward_norm, feed_forward.gate_up)
                out = sum_parts(linear(feed_forward.down, swiglu(feed_forward, h)))
            is_last = number == len(norms)
            h = _norm(x, out, *((self.model.norm, None) if is_last else norms[number]))
            yield x
        assert isinstance(h, Tensor)
        yield h


def _norm(
    x: Tensor, delta: Tensor | Weighted | None, norm: RMSNorm, to: nn.Module | None
) -> Tensor | Scaled:
    """RMSNorm of x + delta, quantized if the layer `to` that reads it is; x becomes the sum."""
    return pointwise.norm(x, delta, norm.weight, norm.eps, input_dtype(to))


def _norm_for_experts(
    x: Tensor, delta: Tensor, norm: RMSNorm, to: Mixture
) -> tuple[Tensor, Scaled | None]:
    """The same for a router, and quantized for its experts if they are."""
    kind = experts_dtype(to)
    if kind is not None:
        return pointwise.norm_both(x, delta, norm.weight, norm.eps, kind)
    plain = pointwise.norm(x, delta, norm.weight, norm.eps, None)
    assert isinstance(plain, Tensor)
    return plain, None
