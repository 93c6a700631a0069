"""Attention of a long prompt on a GPU: the kernel in use against torch's and against larger tiles.

    python measurements/prefill_attention.py [--tokens 8192,32768] [--heads 28] [--kv-heads 4]
    python measurements/prefill_attention.py --model dummy:dream-7b [--tokens 8192,32768]

With a model, its whole prefill is timed: the first round of an answer, without the head. Else one
row whose tokens all see each other, in bf16, nothing cached. Each candidate is checked against
fp32 on a short row, then timed: median ms of one layer, and TFLOP/s. Candidates: `attend`, which
rounds use; the same queries by a plain loop over key tiles with more queries a program
(`_prefill` below); torch's flash attention and cuDNN.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels import error, layout
from lopa import LLM
from lopa.bench.round_work import RoundWork
from lopa.kernels.triton.attention import Rows, attend
from lopa.runner.kv_cache import PAGE

# Queries and keys of a tile, warps, stages
TILINGS = ((128, 64, 8, 3), (128, 128, 8, 2), (128, 64, 8, 2), (64, 64, 4, 4), (64, 128, 4, 3))


@triton.jit
def _prefill(
    q,  # [T, heads, D]
    keys,  # [T, kv_heads · D] by descriptor
    values,
    out,  # [T, heads, D]
    tokens,
    scale,  # of the scores, log2(e) included
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    WIDE: tl.constexpr,  # the interpreter has no product of bf16
):
    # The heads that share keys follow each other, so that these stay in the cache.
    head = tl.program_id(0)
    token = tl.program_id(1) * QUERIES + tl.arange(0, QUERIES)
    dims = tl.arange(0, D)
    place = (token.to(tl.int64)[:, None] * HEADS + head) * D + dims[None, :]
    queries = tl.load(q + place, mask=(token < tokens)[:, None], other=0.0)
    if WIDE:
        queries = queries.to(tl.float32)
    best = tl.full([QUERIES], -float("inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    mixed = tl.zeros([QUERIES, D], tl.float32)
    whole = tokens // KEYS * KEYS
    column = head // GROUP * D
    for at in tl.range(0, whole, KEYS):
        key = keys.load([at, column])
        if WIDE:
            key = key.to(tl.float32)
        scores = tl.dot(queries, tl.trans(key)) * scale
        new = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp2(scores - new[:, None])
        rescale = tl.exp2(best - new)
        total = total * rescale + tl.sum(weights, 1)
        value = values.load([at, column])
        if WIDE:
            value = value.to(tl.float32)
        mixed = tl.dot(weights.to(value.dtype), value, mixed * rescale[:, None])
        best = new
    for at in tl.range(whole, tokens, KEYS, num_stages=1):  # the last, shorter tile
        key = keys.load([at, column])
        value = values.load([at, column])
        if WIDE:
            key, value = key.to(tl.float32), value.to(tl.float32)
        scores = tl.dot(queries, tl.trans(key)) * scale
        inside = (at + tl.arange(0, KEYS) < tokens)[None, :]
        scores = tl.where(inside, scores, -float("inf"))
        new = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp2(scores - new[:, None])
        rescale = tl.exp2(best - new)
        total = total * rescale + tl.sum(weights, 1)
        mixed = tl.dot(weights.to(value.dtype), value, mixed * rescale[:, None])
        best = new
    mixed = mixed / total[:, None]
    tl.store(out + place, mixed.to(out.dtype.element_ty), mask=(token < tokens)[:, None])


def prefill(q: Tensor, k: Tensor, v: Tensor, tiling: tuple[int, int, int, int]) -> Tensor:
    """q [T, heads, D], k and v [T, kv_heads, D]"""
    queries, keys, warps, stages = tiling
    (tokens, heads, dim), kv_heads = q.shape, k.shape[1]
    out = torch.empty_like(q)
    paged = [TensorDescriptor.from_tensor(x.view(tokens, -1), [keys, dim]) for x in (k, v)]
    _prefill[(heads, triton.cdiv(tokens, queries))](
        q,
        *paged,
        out,
        tokens,
        dim**-0.5 * 1.4426950408889634,
        HEADS=heads,
        GROUP=heads // kv_heads,
        D=dim,
        QUERIES=queries,
        KEYS=keys,
        WIDE=not q.is_cuda,
        num_warps=warps,
        num_stages=stages,
    )
    return out


def by_torch(q: Tensor, k: Tensor, v: Tensor, backend: SDPBackend) -> Tensor:
    given = [x.transpose(0, 1)[None] for x in (q, k, v)]
    with sdpa_kernel(backend):
        found = F.scaled_dot_product_attention(*given, enable_gqa=True)
    return found[0].transpose(0, 1)


def in_use(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    nothing = torch.zeros(PAGE, *k.shape[1:], device=k.device, dtype=k.dtype)
    return attend(q, k, v, nothing, nothing, one_row(len(q), q.shape[1] // k.shape[1], q.device))


@cache  # it is laid out once for all layers
def one_row(tokens: int, group: int, device: Any) -> Rows:
    return layout([tokens], 0, 0, None, group, device)[0]


def candidates() -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    found: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"attend": in_use}
    found |= {f"prefill {tiling}": partial(prefill, tiling=tiling) for tiling in TILINGS}
    for name, backend in (
        ("flash", SDPBackend.FLASH_ATTENTION),
        ("cuDNN", SDPBackend.CUDNN_ATTENTION),
    ):
        found[f"torch {name}"] = partial(by_torch, backend=backend)
    return found


def some(tokens: int, heads: int, kv_heads: int, device: Any) -> list[Tensor]:
    counts = heads, kv_heads, kv_heads
    return [torch.randn(tokens, count, 128, device=device).bfloat16() for count in counts]


def milliseconds(work: Callable[[], object], repeats: int = 7) -> float:
    times = []
    for index in range(repeats + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        if index >= 2:
            times.append(begin.elapsed_time(end))
    return statistics.median(times)


def whole_prompts(name: str, sizes: list[int]) -> None:
    llm = LLM(name, dtype="bfloat16", cache_tokens=2 * max(sizes))
    config = llm.decode_config(branches=0, max_new_tokens=32, max_rounds=1)
    for tokens in sizes:
        # Products and attention; the head has 32 tokens, which count for nothing.
        work = RoundWork.of(llm.config, torch.bfloat16, rows=1, window=tokens + 32, prefix=0)
        flops = work.flops - 2 * (tokens + 32) * llm.config.vocab_size * llm.config.hidden_size
        times = []
        for turn in range(4):  # each prompt is another, so that none is cached
            prompt = [1 + (turn + 7 * i) % 200 for i in range(tokens)]
            times.append(llm.generate(prompt, config).first_round_seconds)
        spent = statistics.median(times[1:])
        print(f"{tokens:6} {1e3 * spent:9.1f} ms {flops / spent / 1e12:7.0f} TFLOP/s", flush=True)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tokens", default="8192,32768")
    parser.add_argument("--model", help="time whole prompts of this model instead, in bf16")
    parser.add_argument("--heads", type=int, default=28)
    parser.add_argument("--kv-heads", type=int, default=4)
    options = parser.parse_args()
    if options.model:
        whole_prompts(options.model, [int(tokens) for tokens in options.tokens.split(",")])
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    short = some(700, options.heads, options.kv_heads, device)
    if device.type == "cpu":
        short = some(150, 2, 1, device)
    group = short[0].shape[1] // short[1].shape[1]
    given = [x.transpose(0, 1)[None].float() for x in short]
    given[1:] = [x.repeat_interleave(group, 1) for x in given[1:]]
    plain = F.scaled_dot_product_attention(*given)[0].transpose(0, 1)
    right = {}
    for name, work in candidates().items():
        if name.startswith("torch") and device.type == "cpu":
            continue
        try:
            off = error(work(*short), plain)
        except Exception as failure:  # this device or version of torch lacks it
            print(f"{name}: {type(failure).__name__}: {failure}")
            continue
        print(f"{off:10.2e}  {name}", flush=True)
        if off < 1e-2:
            right[name] = work
    for tokens in map(int, options.tokens.split(",")) if device.type == "cuda" else ():
        row = some(tokens, options.heads, options.kv_heads, device)
        flops = 4 * tokens**2 * options.heads * 128
        for name, work in right.items():
            spent = milliseconds(partial(work, *row))
            print(
                f"{tokens:6} {spent:9.3f} ms {flops / spent / 1e9:7.0f} TFLOP/s  {name}", flush=True
            )


if __name__ == "__main__":
    main()
