"""Dream, DiffuCoder, Dream-Coder, d3LLM-Dream: Qwen2's layout, never causal, shifted rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lopa.models.config import ModelConfig
from lopa.models.family import Family, require
from lopa.models.qwen import TINY, qwen_config, weight_targets


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    return qwen_config(
        raw,
        family=FAMILY.name,
        qkv_bias=True,
        qk_norm=False,
        shift=True,
        mask_id=require(raw, "mask_token_id"),
    )


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
    layouts=(weight_targets,),
    decoders=("vanilla", "fast-dllm", "d2f", "lopa"),
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
    adapters={
        "SJTU-Deng-Lab/D2F_Dream_Base_7B_Lora": "Dream-org/Dream-v0-Base-7B",
        "SJTU-Deng-Lab/D2F_Dream_Instruct_7B_Lora": "Dream-org/Dream-v0-Instruct-7B",
        "SJTU-Deng-Lab/D2F_DiffuCoder_Instruct_7B_Lora": "apple/DiffuCoder-7B-Instruct",
    },
    verified="logits, caches and vanilla, D2F and LoPA runs of the published code, on tiny weights",
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
    tiny=TINY | {"architectures": ["DreamModel"], "model_type": "Dream", "mask_token_id": 258},
)
