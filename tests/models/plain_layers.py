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


def rotate(x: Array, theta: float, dim: int | None = None) -> Array:
    """x [heads, T, D]: of the first d numbers, pairs (i, i + d/2) turned by
    position · theta^(−2i/d)."""
    _, length, size = x.shape
    dim = dim or size
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
    kinds = {"llada": llada, "llada2_moe": llada2}
    return kinds.get(raw["model_type"], qwen)(raw, tensors, ids, sees)


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def split(x: Array, heads: int) -> Array:
    return x.reshape(len(x), heads, -1).transpose(1, 0, 2)


def swiglu(h: Array, t: dict[str, Array], prefix: str) -> Array:
    gate, up = h @ t[prefix + "gate_proj.weight"].T, h @ t[prefix + "up_proj.weight"].T
    return (silu(gate) * up) @ t[prefix + "down_proj.weight"].T


def best(values: Array, count: int) -> list[int]:
    return sorted(range(len(values)), key=lambda i: -values[i])[:count]


def softmax_experts(raw: dict[str, Any], t: dict[str, Array], p: str, h: Array) -> Array:
    """SDAR's mixture, token by token."""
    out = np.zeros_like(h)
    for token, x in enumerate(h):
        z = t[p + "gate.weight"] @ x
        chances = np.exp(z - z.max()) / np.exp(z - z.max()).sum()
        chosen = best(chances, raw["num_experts_per_tok"])
        total = sum(chances[e] for e in chosen) if raw["norm_topk_prob"] else 1.0
        for e in chosen:
            out[token] += chances[e] / total * swiglu(x, t, f"{p}experts.{e}.")
    return out


def sigmoid_experts(raw: dict[str, Any], t: dict[str, Array], p: str, h: Array) -> Array:
    """LLaDA2's mixture, token by token: groups, a bias for the choice, a shared expert."""
    out = np.zeros_like(h)
    count, groups = raw["num_experts"], raw["n_group"]
    size = count // groups
    for token, x in enumerate(h):
        s = 1 / (1 + np.exp(-(t[p + "gate.weight"] @ x)))
        r = s + t.get(p + "gate.expert_bias", 0.0)
        marks = np.array([sum(sorted(r[g * size : (g + 1) * size])[-2:]) for g in range(groups)])
        open_groups = best(marks, raw["topk_group"]) if groups > 1 else [0]
        r = np.array([r[e] if e // size in open_groups else -np.inf for e in range(count)])
        chosen = best(r, raw["num_experts_per_tok"])
        total = 1.0
        if len(chosen) > 1 and raw["norm_topk_prob"]:
            total = sum(s[e] for e in chosen) + 1e-20
        for e in chosen:
            weight = raw["routed_scaling_factor"] * s[e] / total
            out[token] += weight * swiglu(x, t, f"{p}experts.{e}.")
    if raw["num_shared_experts"]:
        out += swiglu(h, t, p + "shared_experts.")
    return out


def llada2(raw: dict[str, Any], t: dict[str, Array], ids: list[int], sees: Any) -> Array:
    eps, theta, dim = raw["rms_norm_eps"], raw["rope_theta"], raw["head_dim"]
    heads, kv = raw["num_attention_heads"], raw["num_key_value_heads"]
    turned = int(dim * raw["partial_rotary_factor"])
    x = t["model.word_embeddings.weight"][ids]
    for i in range(raw["num_hidden_layers"]):
        p = f"model.layers.{i}."
        h = norm(x, t[p + "input_layernorm.weight"], eps)
        merged = h @ t[p + "attention.query_key_value.weight"].T
        merged = merged + t.get(p + "attention.query_key_value.bias", 0.0)
        q, k, v = np.split(merged, [heads * dim, (heads + kv) * dim], axis=1)
        q = norm(split(q, heads), t[p + "attention.query_layernorm.weight"], eps)
        k = norm(split(k, kv), t[p + "attention.key_layernorm.weight"], eps)
        q, k = rotate(q, theta, turned), rotate(k, theta, turned)
        x = x + attend(q, k, split(v, kv), sees) @ t[p + "attention.dense.weight"].T
        h = norm(x, t[p + "post_attention_layernorm.weight"], eps)
        if i < raw["first_k_dense_replace"]:
            x = x + swiglu(h, t, p + "mlp.")
        else:
            x = x + sigmoid_experts(raw, t, p + "mlp.", h)
    head = t.get("lm_head.weight", t["model.word_embeddings.weight"])
    return norm(x, t["model.norm.weight"], eps) @ head.T


def qwen(raw: dict[str, Any], t: dict[str, Array], ids: list[int], sees: Any) -> Array:
    """Dream and Fast-dLLM v2 (biases, no QK norm), SDAR (QK norm, no biases), its mixture."""
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
        if p + "mlp.gate.weight" in t:
            x = x + softmax_experts(raw, t, p + "mlp.", h)
        else:
            x = x + swiglu(h, t, p + "mlp.")
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
