"""Dream, DiffuCoder, Dream-Coder, d3LLM-Dream: Qwen2's layout, never causal, shifted rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lopa.models.config import ModelConfig
from lopa.models.family import (
    Family,
    Target,
    dtype_name,
    merged_targets,
    refuse,
    require,
    token_ids,
)

_LAYER = "model.layers.{i}."
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
    "o": _LAYER + "self_attn.o_proj.weight",
    "gate": _LAYER + "mlp.gate_proj.weight",
    "up": _LAYER + "mlp.up_proj.weight",
    "down": _LAYER + "mlp.down_proj.weight",
}


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    refuse(
        raw,
        {
            "rope_scaling": (None,),
            "use_sliding_window": (None, False),
            "hidden_act": ("silu",),
        },
    )
    hidden, heads = require(raw, "hidden_size"), require(raw, "num_attention_heads")
    return ModelConfig(
        family=FAMILY.name,
        vocab_size=require(raw, "vocab_size"),
        hidden_size=hidden,
        layers=require(raw, "num_hidden_layers"),
        heads=heads,
        kv_heads=require(raw, "num_key_value_heads"),
        head_dim=raw.get("head_dim") or hidden // heads,
        intermediate_size=require(raw, "intermediate_size"),
        norm_eps=require(raw, "rms_norm_eps", float),
        rope_theta=require(raw, "rope_theta", float),
        max_positions=require(raw, "max_position_embeddings"),
        qkv_bias=True,
        qk_norm=False,
        tied_head=bool(raw.get("tie_word_embeddings", False)),
        shift=True,
        mask_id=require(raw, "mask_token_id"),
        eos_ids=token_ids(raw.get("eos_token_id")),
        dtype=dtype_name(raw),
    )


def weight_targets(config: ModelConfig) -> dict[str, Target]:
    return merged_targets(config, _NAMES)


_DREAM_7B = ModelConfig(
    family="dream",
    vocab_size=152064,
    hidden_size=3584,
    layers=28,
    heads=28,
    kv_heads=4,
    head_dim=128,
    intermediate_size=18944,
    norm_eps=1e-6,
    rope_theta=1e6,
    max_positions=131072,
    qkv_bias=True,
    qk_norm=False,
    tied_head=False,
    shift=True,
    mask_id=151666,
    eos_ids=(151643,),
    dtype="bfloat16",
)

FAMILY = Family(
    name="dream",
    architectures=("DreamModel",),
    model_types=("Dream",),
    read_config=read_config,
    weight_targets=weight_targets,
    # Instruct models end a turn with <|im_end|>; DiffuCoder-Instruct pads with <|dlm_pad|>.
    turn_ends=("<|im_end|>", "<|dlm_pad|>"),
    hub_ids=(
        "Dream-org/Dream-v0-Base-7B",
        "Dream-org/Dream-v0-Instruct-7B",
        "Dream-org/Dream-Coder-v0-Instruct-7B",
        "apple/DiffuCoder-7B-Base",
        "apple/DiffuCoder-7B-Instruct",
        "apple/DiffuCoder-7B-cpGRPO",
        "d3LLM/d3LLM_Dream",
    ),
    adapters=(
        "SJTU-Deng-Lab/D2F_Dream_Base_7B_Lora",
        "SJTU-Deng-Lab/D2F_Dream_Instruct_7B_Lora",
        "SJTU-Deng-Lab/D2F_DiffuCoder_Instruct_7B_Lora",
    ),
    shapes={
        "dream-7b": _DREAM_7B,
        "dream-1b": replace(
            _DREAM_7B, hidden_size=1536, layers=28, heads=12, kv_heads=2, intermediate_size=8960
        ),
        # Small enough for tests and demonstrations on any machine.
        "dream-tiny": replace(
            _DREAM_7B,
            vocab_size=260,
            hidden_size=128,
            layers=4,
            heads=8,
            kv_heads=2,
            head_dim=16,
            intermediate_size=384,
            max_positions=4096,
            mask_id=258,
            eos_ids=(256,),
            dtype="float32",
        ),
    },
)
