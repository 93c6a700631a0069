"""LLaDA2.0 and 2.1, mini and flash: a mixture of experts in Ling's layout, rows not shifted.

Block-causal with blocks counted from position 0, prompt included. The router scores by sigmoid,
chooses with a bias from the best groups, and weighs without it. 2.1 has the same layout and is
trained to replace its own tokens; only some copies of its config.json say so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lopa.errors import CheckpointError
from lopa.models.config import MixtureConfig, ModelConfig
from lopa.models.family import (
    Family,
    Target,
    dtype_name,
    merged_targets,
    optional,
    refuse,
    refuse_unknown,
    require,
    token_ids,
)

_BLOCK, _MASK_ID, _EOS_ID = 32, 156895, 156892  # where config.json does not say
_EDIT_THRESHOLD = 0.9  # published with 2.1

_LAYER = "model.layers.{i}."
_EXPERT = _LAYER + "mlp.experts.{e}."
_COMMON = {
    "embedding": "model.word_embeddings.weight",
    "norm": "model.norm.weight",
    "head": "lm_head.weight",
    "attention_norm": _LAYER + "input_layernorm.weight",
    "feed_forward_norm": _LAYER + "post_attention_layernorm.weight",
    "qkv": _LAYER + "attention.query_key_value.weight",
    "qkv_bias": _LAYER + "attention.query_key_value.bias",
    "q_norm": _LAYER + "attention.query_layernorm.weight",
    "k_norm": _LAYER + "attention.key_layernorm.weight",
    "o": _LAYER + "attention.dense.weight",
    "gate": _LAYER + "mlp.gate_proj.weight",
    "up": _LAYER + "mlp.up_proj.weight",
    "down": _LAYER + "mlp.down_proj.weight",
    "router": _LAYER + "mlp.gate.weight",
    "router_bias": _LAYER + "mlp.gate.expert_bias",
    "shared_gate": _LAYER + "mlp.shared_experts.gate_proj.weight",
    "shared_up": _LAYER + "mlp.shared_experts.up_proj.weight",
    "shared_down": _LAYER + "mlp.shared_experts.down_proj.weight",
}
_SEPARATE = _COMMON | {
    "expert_gate": _EXPERT + "gate_proj.weight",
    "expert_up": _EXPERT + "up_proj.weight",
    "expert_down": _EXPERT + "down_proj.weight",
}
_STACKED = _COMMON | {  # as its trainer saves them
    "experts_gate": _LAYER + "mlp.experts.gate_proj",
    "experts_up": _LAYER + "mlp.experts.up_proj",
    "experts_down": _LAYER + "mlp.experts.down_proj",
}
# Fields that `read_config` reads, and the values under which the others change nothing.
_READ = frozenset(
    {
        *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "head_dim", "intermediate_size", "rms_norm_eps", "rope_theta"),
        *("rope_parameters", "max_position_embeddings", "tie_word_embeddings", "use_qkv_bias"),
        *("use_qk_norm", "block_size", "partial_rotary_factor", "rotary_dim", "num_experts"),
        *("num_experts_per_tok", "moe_intermediate_size", "num_shared_experts", "n_group"),
        *("topk_group", "first_k_dense_replace", "moe_router_enable_expert_bias"),
        *("norm_topk_prob", "routed_scaling_factor"),
        # of training, of sliding windows, which are refused, or what the tensors show
        "moe_shared_expert_intermediate_size",
        *("attention_dropout", "embedding_dropout", "output_dropout", "max_window_layers"),
        *("sliding_window",),
    }
)
_PLAIN: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    "rope_scaling": (None,),
    "use_sliding_window": (None, False),
    "use_bias": (None, False),
    "use_rmsnorm": (None, True),
    "norm_head": (None, False),
    "norm_softmax": (None, False),
    "using_split_qkv_in_self_attention": (None, False),
    "score_function": (None, "sigmoid"),
    "router_dtype": (None, "fp32"),
}


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    refuse(raw, _PLAIN)
    refuse_unknown(raw, _READ | _PLAIN.keys())
    rope = raw.get("rope_parameters")  # how newer files put theta, and scaling
    if isinstance(rope, dict):
        refuse(rope, {"rope_type": (None, "default")})
        raw = {**rope, **raw}
    hidden, heads = require(raw, "hidden_size"), require(raw, "num_attention_heads")
    head_dim = optional(raw, "head_dim", hidden // max(1, heads))
    return ModelConfig(
        family=FAMILY.name,
        vocab_size=require(raw, "vocab_size"),
        hidden_size=hidden,
        layers=require(raw, "num_hidden_layers"),
        heads=heads,
        kv_heads=require(raw, "num_key_value_heads"),
        head_dim=head_dim,
        intermediate_size=require(raw, "intermediate_size"),
        norm_eps=require(raw, "rms_norm_eps", float),
        rope_theta=require(raw, "rope_theta", float),
        max_positions=require(raw, "max_position_embeddings"),
        qkv_bias=bool(raw.get("use_qkv_bias", False)),
        qk_norm=raw.get("use_qk_norm") is not False,
        tied_head=bool(raw.get("tie_word_embeddings", False)),
        shift=False,
        mask_id=optional(raw, "mask_token_id", _MASK_ID),
        eos_ids=token_ids(raw.get("eos_token_id")) or (optional(raw, "pad_token_id", _EOS_ID),),
        dtype=dtype_name(raw),
        trained_block=optional(raw, "block_size", _BLOCK),
        edit_threshold=_EDIT_THRESHOLD if "llada21" in str(raw.get("model_type")) else None,
        rotary_dim=_rotary_dim(raw, head_dim),
        mixture=_mixture(raw),
    )


def _rotary_dim(raw: Mapping[str, Any], head_dim: int) -> int:
    if raw.get("partial_rotary_factor") is None:
        return int(require(raw, "rotary_dim"))
    size = int(head_dim * require(raw, "partial_rotary_factor", float))
    if optional(raw, "rotary_dim", size) != size:
        raise CheckpointError(
            f"config.json: rotary_dim is {raw['rotary_dim']} where partial_rotary_factor makes "
            f"{size}: correct one of them"
        )
    return size


def _mixture(raw: Mapping[str, Any]) -> MixtureConfig:
    per_token, inner = require(raw, "num_experts_per_tok"), require(raw, "moe_intermediate_size")
    return MixtureConfig(
        experts=require(raw, "num_experts"),
        per_token=per_token,
        inner=inner,
        shared=inner * optional(raw, "num_shared_experts", 0),
        dense_layers=frozenset(range(optional(raw, "first_k_dense_replace", 0))),
        scoring="sigmoid",
        bias=raw.get("moe_router_enable_expert_bias") is not False,
        groups=require(raw, "n_group"),
        top_groups=require(raw, "topk_group"),
        # A single expert keeps its score.
        renormalise=per_token > 1 and raw.get("norm_topk_prob") is not False,
        scale=require(raw, "routed_scaling_factor", float),
    )


def weight_targets(config: ModelConfig) -> dict[str, Target]:
    return merged_targets(config, _SEPARATE)


def stacked_targets(config: ModelConfig) -> dict[str, Target]:
    return merged_targets(config, _STACKED)


_MINI_EXPERTS = MixtureConfig(
    experts=256,
    per_token=8,
    inner=512,
    shared=512,
    dense_layers=frozenset({0}),
    scoring="sigmoid",
    bias=True,
    groups=8,
    top_groups=4,
    renormalise=True,
    scale=2.5,
)
_MINI = ModelConfig(
    family="llada2",
    vocab_size=157184,
    hidden_size=2048,
    layers=20,
    heads=16,
    kv_heads=4,
    head_dim=128,
    intermediate_size=5120,
    norm_eps=1e-6,
    rope_theta=6e5,
    max_positions=32768,
    qkv_bias=False,
    qk_norm=True,
    tied_head=False,
    shift=False,
    mask_id=_MASK_ID,
    eos_ids=(_EOS_ID,),
    dtype="bfloat16",
    trained_block=_BLOCK,
    rotary_dim=64,
    mixture=_MINI_EXPERTS,
)

FAMILY = Family(
    name="llada2",
    architectures=("LLaDA2MoeModelLM",),
    model_types=("llada2_moe", "llada2_moe_veomni", "llada21_moe"),
    read_config=read_config,
    layouts=(weight_targets, stacked_targets),
    # Its trainer writes use_qk_norm false and normalises all the same.
    told_by_tensors=({"qk_norm": True}, {"tied_head": True}),
    decoders=("llada2", "sdar", "d2f", "lopa"),
    turn_ends=("<|role_end|>",),
    hub_ids=(
        "inclusionAI/LLaDA2.0-mini",
        "inclusionAI/LLaDA2.0-flash",
        "inclusionAI/LLaDA2.1-mini",
        "inclusionAI/LLaDA2.1-flash",
    ),
    verified="logits, routers, caches and runs of 2.0 and 2.1 (editing) of the published code, on "
    "tiny weights",
    shapes={
        "llada2-mini": _MINI,
        "llada2-flash": replace(
            _MINI,
            hidden_size=4096,
            layers=32,
            heads=32,
            intermediate_size=9216,
            mixture=replace(_MINI_EXPERTS, inner=1024, shared=1024),
        ),
    },
    tiny={
        "architectures": ["LLaDA2MoeModelLM"],
        "model_type": "llada2_moe",
        "vocab_size": 260,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 6e5,
        "partial_rotary_factor": 0.5,
        "rotary_dim": 8,
        "rope_scaling": None,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 16,
        "num_shared_experts": 2,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "router_dtype": "fp32",
        "use_bias": False,
        "use_qkv_bias": False,
        "use_qk_norm": True,
        "block_size": 8,
        "mask_token_id": 258,
        "eos_token_id": 256,
        "pad_token_id": 256,
        "torch_dtype": "float32",
    },
)
