"""What a family of models has to say about itself; one small file each says it.

A family translates config.json into a `ModelConfig` (refusing what the transformer does not do)
and names where each tensor of its checkpoints belongs. Nothing outside its file asks which family
a model is of.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lopa.config import DecodeConfig, DecoderName, options_of
from lopa.errors import CheckpointError, ConfigError
from lopa.models.config import ModelConfig
from lopa.models.unreadable import check_quantized


class Target(NamedTuple):
    """Where a checkpoint's tensor lies in one of the transformer's parameters.

    The tensor's axes are the last ones of the parameter; `corner` is where it begins on the
    parameter's axes, and 0 on those that it leaves out.
    """

    parameter: str
    corner: tuple[int, ...]
    shape: tuple[int, ...]

    def place(self, dims: int) -> tuple[int | slice, ...]:
        """What of the parameter, which has so many axes, it is."""
        corner = (*self.corner, *(0,) * (dims - len(self.corner)))
        lead = dims - len(self.shape)
        inside = (slice(at, at + size) for at, size in zip(corner[lead:], self.shape, strict=True))
        return (*corner[:lead], *inside)


@dataclass(frozen=True, slots=True)
class Family:
    name: str
    architectures: tuple[str, ...]
    model_types: tuple[str, ...]
    read_config: Callable[[Mapping[str, Any]], ModelConfig]
    # Where the tensors of its checkpoints belong. Of several layouts the first is the usual one.
    layouts: tuple[Callable[[ModelConfig], dict[str, Target]], ...]
    decoders: tuple[DecoderName, ...]  # those that make sense for it
    # Tokens that end an answer beside the config's eos, when the tokenizer has them.
    turn_ends: tuple[str, ...] = ()
    hub_ids: tuple[str, ...] = ()
    adapters: Mapping[str, str] = field(default_factory=dict)  # published for d2f and lopa → base
    verified: str = ""  # against what it was checked
    # Tensors that checkpoints carry although they follow from the config.
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)
    shapes: Mapping[str, ModelConfig] = field(default_factory=dict)  # for dummy:NAME
    tiny: Mapping[str, Any] = field(default_factory=dict)  # config.json of a few kilobytes' model
    # Fields of the config that a checkpoint's tensors decide where they do not fit config.json.
    told_by_tensors: tuple[Mapping[str, Any], ...] = ({"tied_head": True},)

    def weight_targets(self, config: ModelConfig) -> dict[str, Target]:
        return self.layouts[0](config)

    def defaults(self, config: ModelConfig, decoder: DecoderName | None) -> dict[str, Any]:
        """Settings that suit this model, where a request does not say otherwise."""
        if config.trained_block is None:
            return {}
        chosen = decoder or self.decoders[0]
        suited: dict[str, Any] = {"block_size": config.trained_block, "attention": "block"}
        if config.edit_threshold is not None:
            suited["edit_threshold"] = config.edit_threshold
        used = options_of(chosen)
        return {"decoder": chosen} | {k: v for k, v in suited.items() if k in used}

    def check_gaps(self, config: ModelConfig, settings: DecodeConfig) -> None:
        """Refuse to fill gaps where the text behind them is out of sight."""
        if config.trained_block is not None:
            raise ConfigError(
                f"{self.name} models are block-causal, so a gap cannot see the text behind it: "
                "leave the suffix out, or use another model"
            )
        if settings.attention == "block":
            raise ConfigError(
                "under block attention a gap cannot see the text behind it: use attention full"
            )
        if not settings.early_stop:
            raise ConfigError("gaps are not filled in parity mode: leave early_stop on")

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
    check_quantized(raw)
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


def refuse_unknown(raw: Mapping[str, Any], known: Collection[str]) -> None:
    """Stop at a field that nobody here has read about, unless it is off."""
    for name, value in raw.items():
        if value and name not in known and name not in _ABOUT_FILES:
            raise CheckpointError(
                f"config.json: {name} = {value!r} is not understood: running this model without it "
                "might give wrong results"
            )


# Fields of any config.json that say nothing about the network.
_ABOUT_FILES = frozenset(
    {
        *("architectures", "auto_map", "model_type", "torch_dtype", "dtype"),
        *("transformers_version", "use_cache", "_name_or_path", "name_or_path", "return_dict"),
        *("initializer_range", "bos_token_id", "eos_token_id", "pad_token_id", "mask_token_id"),
        *("id2label", "label2id", "is_encoder_decoder", "is_decoder", "problem_type"),
        *("output_attentions", "output_hidden_states", "output_router_logits"),
        *("chunk_size_feed_forward", "tokenizer_class"),
    }
)


def merged_targets(
    config: ModelConfig,
    names: Mapping[str, str],  # our part → checkpoint key, {i} for the layer and {e} for the expert
) -> dict[str, Target]:
    """Where each tensor goes, given the family's name for each part of the transformer."""
    hidden = config.hidden_size
    found: dict[str, Target] = {
        names["embedding"]: Target("embedding.weight", (), (config.vocab_size, hidden)),
        names["norm"]: Target("norm.weight", (), (hidden,)),
    }
    if not config.tied_head:
        found[names["head"]] = Target("head.weight", (), (config.vocab_size, hidden))
    for i in range(config.layers):
        layer, inside = f"layers.{i}.", f"layers.{i}.feed_forward."
        parts = {
            "attention_norm": Target(layer + "attention_norm.weight", (), (hidden,)),
            "feed_forward_norm": Target(layer + "feed_forward_norm.weight", (), (hidden,)),
            **_attention_targets(config, layer + "attention.", fused="qkv" in names),
        }
        mixture = config.mixture_of(i)
        if mixture is None:
            inner = config.intermediate_size
            parts |= _gated_targets("", inside, hidden, inner)
        else:
            count, inner = mixture.experts, mixture.inner
            parts["router"] = Target(inside + "router.weight", (), (count, hidden))
            if mixture.bias:
                parts["router_bias"] = Target(inside + "router.bias", (), (count,))
            if mixture.shared:
                parts |= _gated_targets("shared_", inside + "shared.", hidden, mixture.shared)
            gate_up, down = inside + "experts.gate_up", inside + "experts.down"
            if "experts_gate" in names:  # all experts in one tensor
                parts["experts_gate"] = Target(gate_up, (), (count, inner, hidden))
                parts["experts_up"] = Target(gate_up, (0, inner), (count, inner, hidden))
                parts["experts_down"] = Target(down, (), (count, hidden, inner))
            else:
                gate_name, up_name, down_name = (names["expert_" + n] for n in _GATED)
                for e in range(count):
                    found |= {
                        gate_name.format(i=i, e=e): Target(gate_up, (e,), (inner, hidden)),
                        up_name.format(i=i, e=e): Target(gate_up, (e, inner), (inner, hidden)),
                        down_name.format(i=i, e=e): Target(down, (e,), (hidden, inner)),
                    }
        for part, target in parts.items():
            found[names[part].format(i=i)] = target
    return found


_GATED = ("gate", "up", "down")


def _gated_targets(prefix: str, inside: str, hidden: int, inner: int) -> dict[str, Target]:
    return {
        prefix + "gate": Target(inside + "gate_up.weight", (), (inner, hidden)),
        prefix + "up": Target(inside + "gate_up.weight", (inner,), (inner, hidden)),
        prefix + "down": Target(inside + "down.weight", (), (hidden, inner)),
    }


def _attention_targets(config: ModelConfig, inside: str, fused: bool) -> dict[str, Target]:
    hidden, dim = config.hidden_size, config.head_dim
    q, kv = config.heads * dim, config.kv_heads * dim
    sizes = {"qkv": (0, q + 2 * kv)} if fused else {"q": (0, q), "k": (q, kv), "v": (q + kv, kv)}
    parts = {"o": Target(inside + "out.weight", (), (hidden, q))}
    for name, (start, size) in sizes.items():
        parts[name] = Target(inside + "qkv.weight", (start,), (size, hidden))
        if config.qkv_bias:
            parts[name + "_bias"] = Target(inside + "qkv.bias", (start,), (size,))
    if config.qk_norm:
        parts["q_norm"] = Target(inside + "q_norm.weight", (), (dim,))
        parts["k_norm"] = Target(inside + "k_norm.weight", (), (dim,))
    return parts
