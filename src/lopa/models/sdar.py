"""SDAR 1.7B, 4B, 8B (dense): Qwen3's layout with QK norm, block diffusion in small blocks.

Block-causal with blocks counted from position 0, prompt included; rows are not shifted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lopa.models.config import ModelConfig
from lopa.models.family import Family, optional
from lopa.models.qwen import TINY, qwen_config, weight_targets

# Where config.json does not say. Checkpoints trained with larger blocks have it in their name only
# (-b8 … -b64): give block_size with the request.
_BLOCK, _MASK_ID = 4, 151669


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    return qwen_config(
        raw,
        family=FAMILY.name,
        qkv_bias=bool(raw.get("attention_bias", False)),
        qk_norm=True,
        shift=False,
        mask_id=optional(raw, "mask_token_id", _MASK_ID),
        trained_block=optional(raw, "block_size", _BLOCK),
    )


_8B = ModelConfig(
    family="sdar",
    vocab_size=151936,
    hidden_size=4096,
    layers=36,
    heads=32,
    kv_heads=8,
    head_dim=128,
    intermediate_size=12288,
    norm_eps=1e-6,
    rope_theta=1e6,
    max_positions=32768,
    qkv_bias=False,
    qk_norm=True,
    tied_head=False,
    shift=False,
    mask_id=_MASK_ID,
    eos_ids=(151643,),
    dtype="bfloat16",
    trained_block=_BLOCK,
)

FAMILY = Family(
    name="sdar",
    architectures=("SDARForCausalLM",),
    model_types=("sdar",),
    read_config=read_config,
    layouts=(weight_targets,),
    decoders=("sdar", "d2f", "lopa"),
    turn_ends=("<|im_end|>",),
    hub_ids=(
        "JetLM/SDAR-1.7B-Chat",
        "JetLM/SDAR-4B-Chat",
        "JetLM/SDAR-8B-Chat",
    ),
    verified="logits, caches and static, dynamic, sequential runs of the published code, on tiny "
    "weights",
    shapes={"sdar-8b": _8B},
    tiny=TINY
    | {
        "architectures": ["SDARForCausalLM"],
        "model_type": "sdar",
        "head_dim": 32,  # not hidden / heads, as in SDAR-4B
        "attention_bias": False,
        "block_size": 4,
        "mask_token_id": 258,
    },
)
