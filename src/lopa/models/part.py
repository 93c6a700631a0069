"""A part of a model: what one of several ranks holds of every parameter.

Heads, the inner widths of feed-forwards and of every expert, and the vocabulary are cut; norms and
routers are on every rank. An expert is cut and not given away whole: then every rank reads the same
bytes in a round, however the router spreads the tokens. QKV and gate/up are merged, so each of
their sections is cut by itself: a part's merged weight is again q | k | v of its own heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from lopa.errors import ConfigError
from lopa.models.config import ModelConfig
from lopa.models.family import Target

Index = tuple[int | slice, ...]


class Cut(NamedTuple):
    """How a parameter is cut: along this axis, each of its sections by itself."""

    axis: int
    sections: tuple[int, ...]


class Piece(NamedTuple):
    """A box of a checkpoint's tensor, and where it belongs in the part's own parameter."""

    source: tuple[slice, ...]
    target: Index


@dataclass(frozen=True, slots=True)
class Part:
    index: int = 0
    count: int = 1  # 1: the whole model

    def held(self, size: int) -> range:
        """What it holds of so many; parts may differ by one."""
        return range(self.index * size // self.count, (self.index + 1) * size // self.count)

    def config(self, config: ModelConfig) -> ModelConfig:
        """Of the part as a model of its own."""
        check(config, self.count)
        mixture, count = config.mixture, self.count
        if mixture is not None:
            mixture = replace(mixture, inner=mixture.inner // count, shared=mixture.shared // count)
        return replace(
            config,
            vocab_size=len(self.held(config.vocab_size)),
            heads=config.heads // count,
            kv_heads=config.kv_heads // count,
            intermediate_size=max(1, config.intermediate_size // count),
            mixture=mixture,
        )

    def pieces(self, target: Target, dims: int, config: ModelConfig) -> Iterator[Piece]:
        """The boxes of a tensor that it holds.

        dims: axes of the parameter; config: of the whole model.
        """
        whole = tuple(slice(0, size) for size in target.shape)
        place, cut = target.place(dims), cut_of(target.parameter, config)
        if cut is None or self.count == 1:
            yield Piece(whole, place)
            return
        there = place[cut.axis]
        assert isinstance(there, slice)  # experts are not shared out
        own = cut.axis - (dims - len(target.shape))  # the same axis of the tensor
        for first, last, at in self._ranges(cut):
            start, stop = max(first, there.start), min(last, there.stop)
            if start < stop:
                source = slice(start - there.start, stop - there.start)
                kept = slice(at + start - first, at + stop - first)
                yield Piece(
                    (*whole[:own], source, *whole[own + 1 :]),
                    (*place[: cut.axis], kept, *place[cut.axis + 1 :]),
                )

    def take(self, whole: Tensor, name: str, config: ModelConfig) -> Iterator[tuple[Index, Tensor]]:
        """What it holds of a parameter, and where that belongs in its own."""
        everything = Target(name, (), tuple(whole.shape))
        for source, target in self.pieces(everything, whole.dim(), config):
            yield target, whole[source]

    def _ranges(self, cut: Cut) -> Iterator[tuple[int, int, int]]:
        """What it holds along the axis: begin, end, and where that begins in its own parameter."""
        start = at = 0
        for size in cut.sections:
            held = self.held(size)
            yield start + held.start, start + held.stop, at
            start, at = start + size, at + len(held)


WHOLE = Part()


def cut_of(parameter: str, config: ModelConfig) -> Cut | None:
    """How a parameter is cut; None: it is on every rank."""
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    inner, mixture = config.intermediate_size, config.mixture
    cuts = {
        "embedding.weight": Cut(0, (config.vocab_size,)),
        "head.weight": Cut(0, (config.vocab_size,)),
        "attention.qkv.weight": Cut(0, (q, kv, kv)),
        "attention.qkv.bias": Cut(0, (q, kv, kv)),
        "attention.out.weight": Cut(1, (q,)),
        "feed_forward.gate_up.weight": Cut(0, (inner, inner)),
        "feed_forward.down.weight": Cut(1, (inner,)),
    }
    if mixture is not None:
        inner, shared = mixture.inner, mixture.shared
        cuts |= {
            "feed_forward.experts.gate_up": Cut(1, (inner, inner)),
            "feed_forward.experts.down": Cut(2, (inner,)),
            "feed_forward.shared.gate_up.weight": Cut(0, (shared, shared)),
            "feed_forward.shared.down.weight": Cut(1, (shared,)),
        }
    return cuts.get(parameter.split(".", 2)[-1] if parameter.startswith("layers.") else parameter)


def check(config: ModelConfig, parts: int) -> None:
    """Refuse a degree that does not cut this model evenly."""
    for name, size in _cut_evenly(config).items():
        if size % parts:
            raise ConfigError(
                f"tensor-parallel {parts} cannot cut this model: its {name} ({size}) do not divide "
                f"by {parts}; use one of {', '.join(map(str, degrees(config)))}"
            )


def degrees(config: ModelConfig) -> list[int]:
    """The degrees of tensor parallelism that cut this model evenly."""
    sizes = _cut_evenly(config).values()
    return [n for n in range(1, config.kv_heads + 1) if not any(size % n for size in sizes)]


def _cut_evenly(config: ModelConfig) -> dict[str, int]:
    sizes = {"heads": config.heads, "key-value heads": config.kv_heads}
    if any(config.mixture_of(i) is None for i in range(config.layers)):
        sizes["inner width"] = config.intermediate_size
    if config.mixture is not None:
        sizes["experts' inner width"] = config.mixture.inner
        sizes["shared experts' inner width"] = config.mixture.shared
    return sizes
