"""A trained model as a folder that the ordinary loader reads: Dream's layout."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from lopa.models.checkpoint import tensors
from lopa.models.config import ModelConfig
from lopa.models.transformer import Transformer
from recipes import files
from recipes.settings import Model


def model_config(model: Model, vocab_size: int, mask_id: int, eos_id: int) -> ModelConfig:
    return ModelConfig(
        family="dream",
        vocab_size=vocab_size,
        hidden_size=model.hidden_size,
        layers=model.layers,
        heads=model.heads,
        kv_heads=model.kv_heads,
        head_dim=model.hidden_size // model.heads,
        intermediate_size=model.intermediate_size,
        norm_eps=model.norm_eps,
        rope_theta=model.rope_theta,
        max_positions=model.max_positions,
        qkv_bias=True,
        qk_norm=False,
        tied_head=model.tied_head,
        shift=True,
        mask_id=mask_id,
        eos_ids=(eos_id,),
        dtype="float32",
    )


def export(model: Transformer, folder: Path) -> None:
    """config.json and model.safetensors; the tokenizer is already there.

    Weights are stored as float16, half the size and eight times finer than bfloat16 at their
    magnitudes, and computed with in float32, which is what config.json asks for.
    """
    config = model.config
    content = {
        "architectures": ["DreamModel"],
        "model_type": "Dream",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "intermediate_size": config.intermediate_size,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": config.tied_head,
        "mask_token_id": config.mask_id,
        "eos_token_id": config.eos_ids[0],
        "bos_token_id": config.eos_ids[0],
        "pad_token_id": config.eos_ids[0],
        "torch_dtype": "float32",
    }
    half = {
        name: tensor.detach().to("cpu", torch.float16).contiguous()
        for name, tensor in tensors(model).items()
    }
    files.write(
        folder / "model.safetensors",
        lambda path: save_file(half, path, metadata={"format": "pt"}),
    )
    files.write_text(folder / "config.json", json.dumps(content, indent=2) + "\n")
