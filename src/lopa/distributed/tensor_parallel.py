"""Tensor parallelism: the parts of one replica on several ranks.

`lopa.models.part` says what a rank holds, and a rank reads no more than that. Here the parts are
made one model: the outputs of attention and of the feed-forward are summed over the ranks, and so
is the embedding (`PartSum`). Weights are plain tensors, not DTensors, whose dispatch would cost the
host time in every call.

Layers are quantised after they are cut. A part's weights and activations then have scales of their
own where inputs are cut, so the figures are not those of one device, only as good.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from lopa.distributed.mesh import Mesh
from lopa.distributed.part_sum import PartSum
from lopa.distributed.vocab_statistics import VocabularyStatistics
from lopa.models.part import Part
from lopa.models.transformer import Transformer


def part_of(mesh: Mesh) -> Part:
    """What of a replica this rank holds."""
    return Part(mesh.tensor_rank, mesh.tensor_parallel)


def join_parts(model: Transformer, mesh: Mesh) -> VocabularyStatistics:
    """Make a loaded part one of a replica; returns what makes statistics of its logits.

    `model.config` becomes that of the part, which is what a cache for it must hold; the vocabulary
    stays that of the model.
    """
    config, part = model.config, part_of(mesh)
    held = part.held(config.vocab_size)
    model.config = replace(part.config(config), vocab_size=config.vocab_size)
    model.part, model.sum_parts = part, PartSum(mesh)
    embedding: Any = model.embedding
    layers: Any = model.layers

    def look_up(tokens: Tensor) -> Tensor:
        own = (tokens >= held.start) & (tokens < held.stop)
        # A product, since torch.where would copy its 0 to the device, which a graph may not do
        found = F.embedding((tokens - held.start) * own, embedding.weight)
        return model.sum_parts(found.masked_fill(~own[:, None], 0.0))

    embedding.forward = look_up
    for layer in layers:
        layer.sum_parts = model.sum_parts
    return VocabularyStatistics(mesh, held.start)
