"""LLaDA-8B, LLaDA-1.5, d3LLM-LLaDA: a llama layout under names of its own, rows not shifted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lopa.models.config import ModelConfig
from lopa.models.family import (
    Family,
    Target,
    dtype_name,
    merged_targets,
    optional,
    refuse,
    require,
    token_ids,
)

_MASK_ID = 126336  # where config.json does not say
_LAYER = "model.transformer.blocks.{i}."
_NAMES = {
    "embedding": "model.transformer.wte.weight",
    "norm": "model.transformer.ln_f.weight",
    "head": "model.transformer.ff_out.weight",  # not to be confused with a block's own ff_out
    "attention_norm": _LAYER + "attn_norm.weight",
    "feed_forward_norm": _LAYER + "ff_norm.weight",
    "q": _LAYER + "q_proj.weight",
    "k": _LAYER + "k_proj.weight",
    "v": _LAYER + "v_proj.weight",
    "o": _LAYER + "attn_out.weight",
    "gate": _LAYER + "ff_proj.weight",
    "up": _LAYER + "up_proj.weight",
    "down": _LAYER + "ff_out.weight",
}


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    refuse(
        raw,
        {
            "rope": (True,),
            "alibi": (None, False),
            "layer_norm_type": ("rms",),
            "activation_type": ("silu",),
            "block_type": ("llama",),
            "block_group_size": (None, 1),
            "include_bias": (None, False),
            "include_qkv_bias": (None, False),
            "attention_layer_norm": (None, False),
            "input_emb_norm": (None, False),
            "scale_logits": (None, False),
            "rope_scaling": (None,),
        },
    )
    hidden, heads = require(raw, "d_model"), require(raw, "n_heads")
    return ModelConfig(
        family=FAMILY.name,
        vocab_size=optional(raw, "embedding_size", 0) or require(raw, "vocab_size"),
        hidden_size=hidden,
        layers=require(raw, "n_layers"),
        heads=heads,
        kv_heads=optional(raw, "n_kv_heads", heads),
        head_dim=hidden // max(1, heads),
        intermediate_size=optional(raw, "mlp_hidden_size", 0) or require(raw, "mlp_ratio") * hidden,
        norm_eps=require(raw, "rms_norm_eps", float),
        rope_theta=require(raw, "rope_theta", float),
        max_positions=require(raw, "max_sequence_length"),
        qkv_bias=False,
        qk_norm=False,
        tied_head=bool(raw.get("weight_tying", False)),
        shift=False,
        mask_id=optional(raw, "mask_token_id", _MASK_ID),
        eos_ids=token_ids(raw.get("eos_token_id")),
        dtype=dtype_name(raw),
    )


def weight_targets(config: ModelConfig) -> dict[str, Target]:
    return merged_targets(config, _NAMES)


_LLADA_8B = ModelConfig(
    family="llada",
    vocab_size=126464,
    hidden_size=4096,
    layers=32,
    heads=32,
    kv_heads=32,
    head_dim=128,
    intermediate_size=12288,
    norm_eps=1e-5,
    rope_theta=5e5,
    max_positions=4096,
    qkv_bias=False,
    qk_norm=False,
    tied_head=False,
    shift=False,
    mask_id=_MASK_ID,
    eos_ids=(126081,),
    dtype="bfloat16",
)

FAMILY = Family(
    name="llada",
    architectures=("LLaDAModelLM",),
    model_types=("llada",),
    read_config=read_config,
    layouts=(weight_targets,),
    decoders=("vanilla", "fast-dllm", "d2f", "lopa"),
    turn_ends=("<|eot_id|>",),
    hub_ids=(
        "GSAI-ML/LLaDA-8B-Base",
        "GSAI-ML/LLaDA-8B-Instruct",
        "GSAI-ML/LLaDA-1.5",
        "d3LLM/d3LLM_LLaDA",
    ),
    adapters={"SJTU-Deng-Lab/D2F_LLaDA_Instruct_8B_Lora": "GSAI-ML/LLaDA-8B-Instruct"},
    verified="logits, LoRA and semi-autoregressive, Fast-dLLM and D2F runs of the published code, "
    "on tiny weights",
    shapes={"llada-8b": _LLADA_8B},
    tiny={
        "architectures": ["LLaDAModelLM"],
        "model_type": "llada",
        "d_model": 64,
        "n_heads": 4,
        "n_kv_heads": 4,
        "n_layers": 3,
        "mlp_hidden_size": 128,
        "vocab_size": 260,
        "embedding_size": 260,
        "max_sequence_length": 512,
        "rms_norm_eps": 1e-5,
        "rope": True,
        "rope_theta": 5e5,
        "layer_norm_type": "rms",
        "activation_type": "silu",
        "block_type": "llama",
        "weight_tying": False,
        "mask_token_id": 258,
        "eos_token_id": 256,
        "pad_token_id": 256,
        "torch_dtype": "float32",
    },
)
