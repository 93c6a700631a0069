"""Fast-dLLM v2 (7B, 1.5B): Qwen2.5's layout, block-causal from position 0, shifted rows.

Its own sampler (sub-blocks, a first token taken autoregressively) is not here; D2F and LoPA are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lopa.models.config import ModelConfig
from lopa.models.family import Family, optional
from lopa.models.qwen import TINY, qwen_config, weight_targets

_BLOCK, _MASK_ID = 32, 151665  # where config.json does not say; it never has the mask


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    return qwen_config(
        raw,
        family=FAMILY.name,
        qkv_bias=True,
        qk_norm=False,
        shift=True,
        mask_id=optional(raw, "mask_token_id", _MASK_ID),
        trained_block=optional(raw, "bd_size", _BLOCK),
    )


FAMILY = Family(
    name="fast-dllm-v2",
    architectures=("Fast_dLLM_QwenForCausalLM",),
    model_types=("Fast_dLLM_Qwen",),
    read_config=read_config,
    layouts=(weight_targets,),
    decoders=("d2f", "lopa"),
    turn_ends=("<|im_end|>",),
    hub_ids=("Efficient-Large-Model/Fast_dLLM_v2_7B", "Efficient-Large-Model/Fast_dLLM_v2_1.5B"),
    verified="logits and cached steps of the published code, on tiny weights; not its own sampler",
    tiny=TINY
    | {
        "architectures": ["Fast_dLLM_QwenForCausalLM"],
        "model_type": "Fast_dLLM_Qwen",
        "bd_size": 8,
        "mask_token_id": 258,
    },
)
