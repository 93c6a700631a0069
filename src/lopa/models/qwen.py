"""Qwen's names and config fields, which Dream, SDAR, SDAR's mixture and Fast-dLLM v2 build on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lopa.models.config import ModelConfig
from lopa.models.family import (
    Target,
    dtype_name,
    merged_targets,
    optional,
    refuse,
    require,
    token_ids,
)

_LAYER = "model.layers.{i}."
_EXPERT = _LAYER + "mlp.experts.{e}."
_NAMES = {
    "embedding": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "head": "lm_head.weight",
    "attention_norm": _LAYER + "input_layernorm.weight",
    "feed_forward_norm": _LAYER + "post_attention_layernorm.weight",
    "q": _LAYER + "self_attn.q_proj.weight",
    "k": _LAYER + "self_attn.k_proj.weight",
    "v": _LAYER + "self_attn.v_proj.weight",
    "q_bias": _LAYER + "self_attn.q_proj.bias",
    "k_bias": _LAYER + "self_attn.k_proj.bias",
    "v_bias": _LAYER + "self_attn.v_proj.bias",
    "q_norm": _LAYER + "self_attn.q_norm.weight",
    "k_norm": _LAYER + "self_attn.k_norm.weight",
    "o": _LAYER + "self_attn.o_proj.weight",
    "gate": _LAYER + "mlp.gate_proj.weight",
    "up": _LAYER + "mlp.up_proj.weight",
    "down": _LAYER + "mlp.down_proj.weight",
    "router": _LAYER + "mlp.gate.weight",
    "expert_gate": _EXPERT + "gate_proj.weight",
    "expert_up": _EXPERT + "up_proj.weight",
    "expert_down": _EXPERT + "down_proj.weight",
}


# Fields that change the network, and the values under which they do not.
PLAIN: dict[str, tuple[object, ...]] = {
    "rope_scaling": (None,),
    "use_sliding_window": (None, False),
    "hidden_act": ("silu",),
}
# Fields that `qwen_config` reads.
READ = frozenset(
    {
        *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "head_dim", "intermediate_size", "rms_norm_eps", "rope_theta"),
        *("rope_parameters", "max_position_embeddings", "tie_word_embeddings"),
    }
)


def qwen_config(raw: Mapping[str, Any], **own: Any) -> ModelConfig:
    """What all of them have in common; `own` is what the family adds or decides."""
    refuse(raw, PLAIN | ({} if "mixture" in own else {"num_experts": (None, 0)}))
    rope = raw.get("rope_parameters")  # how newer files put theta, and scaling
    if isinstance(rope, dict):
        refuse(rope, {"rope_type": (None, "default")})
        raw = {**rope, **raw}
    hidden, heads = require(raw, "hidden_size"), require(raw, "num_attention_heads")
    return ModelConfig(
        vocab_size=require(raw, "vocab_size"),
        hidden_size=hidden,
        layers=require(raw, "num_hidden_layers"),
        heads=heads,
        kv_heads=require(raw, "num_key_value_heads"),
        head_dim=optional(raw, "head_dim", hidden // max(1, heads)),
        intermediate_size=require(raw, "intermediate_size"),
        norm_eps=require(raw, "rms_norm_eps", float),
        rope_theta=require(raw, "rope_theta", float),
        max_positions=require(raw, "max_position_embeddings"),
        tied_head=bool(raw.get("tie_word_embeddings", False)),
        eos_ids=token_ids(raw.get("eos_token_id")),
        dtype=dtype_name(raw),
        **own,
    )


def weight_targets(config: ModelConfig) -> dict[str, Target]:
    return merged_targets(config, _NAMES)


# A checkpoint of a few kilobytes: what `make-tiny` writes, with the family's own fields on top.
TINY: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "rope_scaling": None,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "torch_dtype": "float32",
    "eos_token_id": 256,
    "pad_token_id": 256,
    "bos_token_id": 256,
}
