"""What a family of models has to say about itself; one small file each says it.

A family translates config.json into a `ModelConfig` (refusing what the transformer does not do)
and names where each tensor of its checkpoints belongs. Nothing outside its file asks which family
a model is of.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lopa.config import DecodeConfig, DecoderName, options_of
from lopa.errors import CheckpointError, ConfigError
from lopa.models.config import ModelConfig


class Target(NamedTuple):
    """Rows [start, start + shape[0]) of one of the transformer's parameters."""

    parameter: str
    start: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Family:
    name: str
    architectures: tuple[str, ...]
    model_types: tuple[str, ...]
    read_config: Callable[[Mapping[str, Any]], ModelConfig]
    weight_targets: Callable[[ModelConfig], dict[str, Target]]
    decoders: tuple[DecoderName, ...]  # those that make sense for it
    # Tokens that end an answer beside the config's eos, when the tokenizer has them.
    turn_ends: tuple[str, ...] = ()
    hub_ids: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    verified: str = ""  # against what it was checked
    # Tensors that checkpoints carry although they follow from the config.
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)
    shapes: Mapping[str, ModelConfig] = field(default_factory=dict)  # for dummy:NAME
    tiny: Mapping[str, Any] = field(default_factory=dict)  # config.json of a few kilobytes' model

    def defaults(self, config: ModelConfig, decoder: DecoderName | None) -> dict[str, Any]:
        """Settings that suit this model, where a request does not say otherwise."""
        if config.trained_block is None:
            return {}
        chosen = decoder or self.decoders[0]
        suited = {"block_size": config.trained_block, "attention": "block"}
        used = options_of(chosen)
        return {"decoder": chosen} | {k: v for k, v in suited.items() if k in used}

    def check(self, config: ModelConfig, settings: DecodeConfig) -> None:
        """Refuse settings under which this model would give wrong results."""
        if settings.decoder not in self.decoders:
            raise ConfigError(
                f"the {settings.decoder} decoder does not fit {self.name} models: "
                f"use {', '.join(self.decoders)}"
            )
        block_causal = settings.window == "pipeline" and settings.attention == "block"
        if config.trained_block is not None and not block_causal:
            raise ConfigError(
                f"{self.name} models are block-causal: use attention block on the pipeline window"
            )


def require(raw: Mapping[str, Any], name: str, kind: type = int) -> Any:
    """A field that config.json must have, of the right type."""
    value = raw.get(name)
    wrong = isinstance(value, bool) and kind is not bool
    if kind is float and isinstance(value, int):
        value = float(value) if value.bit_length() < 1000 else math.inf
    if isinstance(value, float) and not 0 < value < math.inf:
        raise CheckpointError(f"config.json: {name} is {value}: this is not a complete checkpoint")
    if not isinstance(value, kind) or wrong:
        problem = "is missing" if value is None else f"is {value!r}, not {kind.__name__}"
        raise CheckpointError(f"config.json: {name} {problem}: this is not a complete checkpoint")
    return value


def optional(raw: Mapping[str, Any], name: str, default: int) -> int:
    """A whole number that config.json may leave out."""
    return int(require(raw, name)) if raw.get(name) is not None else default


def refuse(raw: Mapping[str, Any], unsupported: Mapping[str, tuple[object, ...]]) -> None:
    """Stop at a field whose value is none of those the transformer implements."""
    unsupported = {**unsupported, "quantization_config": (None,)}
    for name, allowed in unsupported.items():
        if name in raw and raw[name] not in allowed:
            wants = " or ".join(repr(value) for value in allowed)
            raise CheckpointError(
                f"config.json: {name} = {raw[name]!r} is not supported (only {wants}): "
                "running this model would give wrong results"
            )


def token_ids(value: object) -> tuple[int, ...]:
    """An id field of config.json: one id, a list of them, or none."""
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise CheckpointError(f"config.json: token ids must be whole numbers, got {value!r}")
    return tuple(ids)


def dtype_name(raw: Mapping[str, Any]) -> str:
    return str(raw.get("torch_dtype") or raw.get("dtype") or "float32").removeprefix("torch.")


def merged_targets(
    config: ModelConfig,
    names: Mapping[str, str],  # our part → checkpoint key with {i} for the layer
) -> dict[str, Target]:
    """Where each tensor goes, given the family's name for each part of the transformer."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    found: dict[str, Target] = {
        names["embedding"]: Target("embedding.weight", 0, (config.vocab_size, hidden)),
        names["norm"]: Target("norm.weight", 0, (hidden,)),
    }
    if not config.tied_head:
        found[names["head"]] = Target("head.weight", 0, (config.vocab_size, hidden))
    for i in range(config.layers):
        layer = f"layers.{i}."
        attention, inside = layer + "attention.", layer + "feed_forward."
        parts = {
            "attention_norm": Target(layer + "attention_norm.weight", 0, (hidden,)),
            "feed_forward_norm": Target(layer + "feed_forward_norm.weight", 0, (hidden,)),
            "q": Target(attention + "qkv.weight", 0, (q, hidden)),
            "k": Target(attention + "qkv.weight", q, (kv, hidden)),
            "v": Target(attention + "qkv.weight", q + kv, (kv, hidden)),
            "o": Target(attention + "out.weight", 0, (hidden, q)),
            "gate": Target(inside + "gate_up.weight", 0, (inner, hidden)),
            "up": Target(inside + "gate_up.weight", inner, (inner, hidden)),
            "down": Target(inside + "down.weight", 0, (hidden, inner)),
        }
        if config.qkv_bias:
            parts["q_bias"] = Target(attention + "qkv.bias", 0, (q,))
            parts["k_bias"] = Target(attention + "qkv.bias", q, (kv,))
            parts["v_bias"] = Target(attention + "qkv.bias", q + kv, (kv,))
        if config.qk_norm:
            parts["q_norm"] = Target(attention + "q_norm.weight", 0, (config.head_dim,))
            parts["k_norm"] = Target(attention + "k_norm.weight", 0, (config.head_dim,))
        for part, target in parts.items():
            found[names[part].format(i=i)] = target
    return found
