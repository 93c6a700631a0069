"""Each family's layer equations in plain numpy (fp64), straight from its checkpoint's own names.

Shares nothing with the package: what it computes is what the package's transformer must give.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file

Array = npt.NDArray[np.float64]


def norm(x: Array, weight: Array, eps: float) -> Array:
    return weight * x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


def rotate(x: Array, theta: float) -> Array:
    """x [heads, T, d]: pairs (i, i + d/2) turned by position · theta^(−2i/d)."""
    _, length, dim = x.shape
    half = dim // 2
    out = x.copy()
    for position in range(length):
        for i in range(half):
            angle = position * theta ** (-2 * i / dim)
            a, b = x[:, position, i], x[:, position, i + half]
            out[:, position, i] = a * np.cos(angle) - b * np.sin(angle)
            out[:, position, i + half] = b * np.cos(angle) + a * np.sin(angle)
    return out


def attend(q: Array, k: Array, v: Array, sees: npt.NDArray[np.bool_]) -> Array:
    """q [H, T, d], k and v [K, T, d] → [T, H·d]."""
    group = len(q) // len(k)
    heads = []
    for h in range(len(q)):
        scores = q[h] @ k[h // group].T / np.sqrt(q.shape[-1])
        scores = np.where(sees, scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        heads.append(weights / weights.sum(-1, keepdims=True) @ v[h // group])
    return np.concatenate(heads, axis=-1)


def plain_logits(folder: Path, ids: list[int], sees: npt.NDArray[np.bool_]) -> Array:
    raw = json.loads((folder / "config.json").read_text())
    tensors = {k: v.astype(np.float64) for k, v in load_file(folder / "model.safetensors").items()}
    kind = raw["model_type"]
    return (llada if kind == "llada" else qwen)(raw, tensors, ids, sees)


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def split(x: Array, heads: int) -> Array:
    return x.reshape(len(x), heads, -1).transpose(1, 0, 2)


def qwen(raw: dict[str, Any], t: dict[str, Array], ids: list[int], sees: Any) -> Array:
    """Dream and Fast-dLLM v2 (biases, no QK norm) and SDAR (QK norm, no biases)."""
    eps, theta = raw["rms_norm_eps"], raw["rope_theta"]
    heads, kv = raw["num_attention_heads"], raw["num_key_value_heads"]
    x = t["model.embed_tokens.weight"][ids]
    for i in range(raw["num_hidden_layers"]):
        p = f"model.layers.{i}."
        h = norm(x, t[p + "input_layernorm.weight"], eps)

        def project(name: str, count: int, h: Array = h, p: str = p) -> Array:
            out = h @ t[f"{p}self_attn.{name}_proj.weight"].T
            return split(out + t.get(f"{p}self_attn.{name}_proj.bias", 0.0), count)

        q, k, v = project("q", heads), project("k", kv), project("v", kv)
        if p + "self_attn.q_norm.weight" in t:
            q = norm(q, t[p + "self_attn.q_norm.weight"], eps)
            k = norm(k, t[p + "self_attn.k_norm.weight"], eps)
        mixed = attend(rotate(q, theta), rotate(k, theta), v, sees)
        x = x + mixed @ t[p + "self_attn.o_proj.weight"].T
        h = norm(x, t[p + "post_attention_layernorm.weight"], eps)
        gate, up = h @ t[p + "mlp.gate_proj.weight"].T, h @ t[p + "mlp.up_proj.weight"].T
        x = x + (silu(gate) * up) @ t[p + "mlp.down_proj.weight"].T
    head = t.get("lm_head.weight", t["model.embed_tokens.weight"])
    return norm(x, t["model.norm.weight"], eps) @ head.T


def llada(raw: dict[str, Any], t: dict[str, Array], ids: list[int], sees: Any) -> Array:
    eps, theta, heads = raw["rms_norm_eps"], raw["rope_theta"], raw["n_heads"]
    x = t["model.transformer.wte.weight"][ids]
    for i in range(raw["n_layers"]):
        p = f"model.transformer.blocks.{i}."
        h = norm(x, t[p + "attn_norm.weight"], eps)
        q, k, v = (split(h @ t[f"{p}{n}_proj.weight"].T, heads) for n in "qkv")
        mixed = attend(rotate(q, theta), rotate(k, theta), v, sees)
        x = x + mixed @ t[p + "attn_out.weight"].T
        h = norm(x, t[p + "ff_norm.weight"], eps)
        gate, up = h @ t[p + "ff_proj.weight"].T, h @ t[p + "up_proj.weight"].T
        x = x + (silu(gate) * up) @ t[p + "ff_out.weight"].T
    return norm(x, t["model.transformer.ln_f.weight"], eps) @ t["model.transformer.ff_out.weight"].T
