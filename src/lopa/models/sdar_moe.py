"""SDAR 30B-A3B: SDAR with the experts of Qwen3's mixture, block diffusion in small blocks.

The router is a softmax over all experts; there are no groups, no bias and no shared expert.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lopa.errors import CheckpointError
from lopa.models.config import MixtureConfig, ModelConfig
from lopa.models.family import Family, optional, refuse_unknown, require
from lopa.models.qwen import PLAIN, READ, TINY, qwen_config, weight_targets

_BLOCK, _MASK_ID = 4, 151669  # where config.json does not say, as in SDAR

_READ = READ | frozenset(
    {
        *("attention_bias", "block_size", "num_experts", "num_experts_per_tok"),
        *("moe_intermediate_size", "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers"),
        # of training, or of sliding windows, which are refused
        *("attention_dropout", "router_aux_loss_coef", "fuse_cross_entropy"),
        *("max_window_layers", "sliding_window", "debug"),
    }
)


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    known = _READ | PLAIN.keys()
    if set(raw.get("layer_types") or ()) == {"full_attention"}:
        known |= {"layer_types"}
    refuse_unknown(raw, known)
    return qwen_config(
        raw,
        family=FAMILY.name,
        qkv_bias=bool(raw.get("attention_bias", False)),
        qk_norm=True,
        shift=False,
        mask_id=optional(raw, "mask_token_id", _MASK_ID),
        trained_block=optional(raw, "block_size", _BLOCK),
        mixture=MixtureConfig(
            experts=require(raw, "num_experts"),
            per_token=require(raw, "num_experts_per_tok"),
            inner=require(raw, "moe_intermediate_size"),
            dense_layers=_dense_layers(raw),
            scoring="softmax",
            renormalise=bool(raw.get("norm_topk_prob", False)),
        ),
    )


def _dense_layers(raw: Mapping[str, Any]) -> frozenset[int]:
    listed = raw.get("mlp_only_layers") or []
    if not isinstance(listed, list) or not all(isinstance(i, int) for i in listed):
        raise CheckpointError(f"config.json: mlp_only_layers is {listed!r}, not a list of layers")
    step = optional(raw, "decoder_sparse_step", 1)
    if step < 1:
        raise CheckpointError(f"config.json: decoder_sparse_step is {step}, not above 0")
    layers = range(require(raw, "num_hidden_layers"))
    return frozenset(i for i in layers if i in listed or (i + 1) % step)


_30B = ModelConfig(
    family="sdar-moe",
    vocab_size=151936,
    hidden_size=2048,
    layers=48,
    heads=32,
    kv_heads=4,
    head_dim=128,
    intermediate_size=6144,
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
    mixture=MixtureConfig(experts=128, per_token=8, inner=768, scoring="softmax", renormalise=True),
)

FAMILY = Family(
    name="sdar-moe",
    architectures=("SDARMoeForCausalLM",),
    model_types=("sdar_moe",),
    read_config=read_config,
    layouts=(weight_targets,),
    decoders=("sdar", "d2f", "lopa"),
    turn_ends=("<|im_end|>",),
    hub_ids=(
        "JetLM/SDAR-30B-A3B-Chat",
        "JetLM/SDAR-30B-A3B-Sci",
        "JetLM/SDAR-30B-A3B-Chat-b32",
    ),
    verified="logits, routers, caches and static, dynamic, sequential runs of the published code, "
    "on tiny weights",
    shapes={"sdar-30b-a3b": _30B},
    tiny=TINY
    | {
        "architectures": ["SDARMoeForCausalLM"],
        "model_type": "sdar_moe",
        "head_dim": 32,
        "attention_bias": False,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [1],
        "block_size": 4,
        "mask_token_id": 258,
    },
)
