"""Tensor parallelism: the parts of one replica on several ranks, through torch's parallel styles.

Heads, the feed-forward's inner width and the vocabulary are cut; norms are on every rank. QKV and
gate/up are merged, so each of their sections is cut by itself: a rank's merged weight is again
q | k | v of its own heads. The output of attention and of the feed-forward are summed over the
ranks, and so is the embedding. Weights are plain tensors, not DTensors, whose dispatch would cost
the host time in every call.

A whole model is read into host memory and cut there: the device never holds more than its part.
Layers are quantised after they are cut. A part's weights and activations then have scales of their
own where inputs are cut, so the figures are not those of one device, only as good.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from lopa.distributed.mesh import Mesh
from lopa.distributed.vocab_statistics import VocabularyStatistics, part_of
from lopa.errors import ConfigError
from lopa.models.config import ModelConfig
from lopa.models.transformer import Transformer


def check(config: ModelConfig, parts: int) -> None:
    """Refuse a degree that does not cut this model evenly."""
    cut = {
        "heads": config.heads,
        "key-value heads": config.kv_heads,
        "inner width": config.intermediate_size,
    }
    for name, size in cut.items():
        if size % parts:
            raise ConfigError(
                f"tensor-parallel {parts} cannot cut this model: its {name} ({size}) do not divide "
                f"by {parts}; use one of {', '.join(map(str, degrees(config)))}"
            )


def degrees(config: ModelConfig) -> list[int]:
    """The degrees of tensor parallelism that cut this model evenly."""
    sizes = (config.heads, config.kv_heads, config.intermediate_size)
    return [n for n in range(1, config.kv_heads + 1) if not any(size % n for size in sizes)]


def cut(model: Transformer, mesh: Mesh, device: torch.device) -> VocabularyStatistics:
    """Keep this rank's part of the model, on `device`; returns what makes statistics of it.

    `model.config` becomes that of the part: what a cache for it must hold.
    """
    config, parts = model.config, mesh.tensor_parallel
    check(config, parts)
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    inner = config.intermediate_size
    styles: dict[str, ParallelStyle] = {
        "embedding": _Vocabulary(mesh, device, sums=True),
        "layers.*.attention.qkv": _Columns(mesh, device, (q, kv, kv)),
        "layers.*.attention.out": _Rows(mesh, device),
        "layers.*.feed_forward.gate_up": _Columns(mesh, device, (inner, inner)),
        "layers.*.feed_forward.down": _Rows(mesh, device),
    }
    if not config.tied_head:
        styles["head"] = _Vocabulary(mesh, device, sums=False)
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            continue  # those have styles
        if any(True for _ in module.parameters(recurse=False)):
            module.to(device)  # norms
    parallelize_module(model, _device_mesh(mesh, device), styles)
    for layer in model.layers:
        attention: Any = layer.attention
        attention.heads, attention.kv_heads = config.heads // parts, config.kv_heads // parts
    model.config = replace(
        config,
        heads=config.heads // parts,
        kv_heads=config.kv_heads // parts,
        intermediate_size=config.intermediate_size // parts,
    )
    return VocabularyStatistics(mesh, part_of(config.vocab_size, mesh.tensor_rank, parts).start)


def sum_outputs(model: Transformer, mesh: Mesh) -> None:
    """Attention and feed-forward give sums over the ranks from now on.

    After the layers have their final form: a quantised layer is another module.
    """
    for layer in model.layers:
        for module in (layer.attention.out, layer.feed_forward.down):  # type: ignore[union-attr]
            module.register_forward_hook(lambda _module, _inputs, out: mesh.sum_over_parts(out))  # type: ignore[union-attr]


def _device_mesh(mesh: Mesh, device: torch.device) -> DeviceMesh:
    return DeviceMesh.from_group(
        [mesh.across, mesh.within],
        device.type,
        mesh=torch.arange(mesh.world).view(mesh.branch_parallel, mesh.tensor_parallel),
        mesh_dim_names=("branch", "tensor"),
    )["tensor"]


class _Style(ParallelStyle):
    def __init__(self, mesh: Mesh, device: torch.device) -> None:
        self.mesh, self.device = mesh, device

    def _keep(self, module: nn.Module, name: str, part: Tensor) -> None:
        kept = part.to(self.device).clone(memory_format=torch.contiguous_format)
        setattr(module, name, nn.Parameter(kept, requires_grad=False))


class _Columns(_Style):
    """Cut the outputs, each section of a merged weight by itself."""

    def __init__(self, mesh: Mesh, device: torch.device, sections: Sequence[int]) -> None:
        super().__init__(mesh, device)
        self.sections = list(sections)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        here, parts = self.mesh.tensor_rank, self.mesh.tensor_parallel
        for name, parameter in list(module.named_parameters(recurse=False)):
            rows = [s.chunk(parts)[here] for s in torch.split(parameter.data, self.sections)]
            self._keep(module, name, torch.cat(rows))
        return module


class _Rows(_Style):
    """Cut the inputs; outputs are to be summed over the ranks: see `sum_outputs`."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        weight: Any = module.weight
        self._keep(
            module,
            "weight",
            weight.data.chunk(self.mesh.tensor_parallel, dim=1)[self.mesh.tensor_rank],
        )
        return module


class _Vocabulary(_Style):
    """Cut the vocabulary: an embedding looks up what it holds and sums, a head keeps its part."""

    def __init__(self, mesh: Mesh, device: torch.device, sums: bool) -> None:
        super().__init__(mesh, device)
        self.sums = sums

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        weight: Any = module.weight
        held = part_of(len(weight), self.mesh.tensor_rank, self.mesh.tensor_parallel)
        self._keep(module, "weight", weight.data[held.start : held.stop])
        if self.sums:
            module.forward = lambda tokens: self._look_up(module, tokens, held)
        return module

    def _look_up(self, module: nn.Module, tokens: Tensor, held: range) -> Tensor:
        weight: Any = module.weight
        own = (tokens >= held.start) & (tokens < held.stop)
        found = F.embedding(torch.where(own, tokens - held.start, 0), weight)
        return self.mesh.sum_over_parts(found.masked_fill(~own[:, None], 0.0))
