"""The kernels on a GPU: first checks of their results, then the time of each.

    python measurements/kernels.py [--model dummy:dream-7b] [--tokens 64,128,256,384,512]

Checks compare with plain torch in fp32 on random inputs. Times are of one layer: a graph runs the
operation once for each layer of the model, with that layer's own weights, so that the L2 cache
holds no more than in a round.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from graph_time import microseconds
from lopa import LLM, DecodeConfig
from lopa.decoding.round_cost import RoundCost
from lopa.engine.scheduler import Scheduler
from lopa.kernels.compressed_linear import CompressedLinear
from lopa.kernels.cublaslt import algorithms_of, all_entries, cublaslt_table
from lopa.kernels.hopper.common import arrange_rows, available
from lopa.kernels.hopper.compressed_gemm import CompressedWeight, compress
from lopa.kernels.hopper.swiglu_gemm import supports, swiglu_gemm
from lopa.kernels.quantize import KINDS, QuantizedLinear
from lopa.kernels.scaled import quantize_rows
from lopa.kernels.triton import pointwise
from lopa.kernels.triton.attention import TILE, Rows, attend
from lopa.kernels.triton.confidence import RANKINGS, confidence
from lopa.kernels.triton.matmul import scaled_matmul
from lopa.runner.attention import Span, reference_batch, sdpa_batch
from lopa.runner.backend_triton import TritonBackend
from lopa.runner.kv_cache import PAGE
from lopa.runner.paged import PagedRunner
from lopa.runner.statistics import statistics as plain_statistics


def error(ours: Tensor, plain: Tensor) -> float:
    if not torch.isfinite(ours).all():
        return float("nan")
    return float((ours.double() - plain.double()).norm() / plain.double().norm())


def layout(
    lengths: list[int],
    cached: int,
    start: int,
    size: int | None,
    group: int,
    device: Any,
) -> tuple[Rows, Span]:
    """One sequence whose pages lie in disorder."""
    count = max(1, -(-cached // PAGE))
    table = torch.randperm(count + 2, device=device)[:count]
    seen = torch.arange(cached, device=device)
    seen = seen[(seen < start) | (seen >= start + max(lengths))]
    blocks = None if size is None else torch.arange(max(lengths), device=device) // size
    span = Span(0, lengths, table[seen // PAGE] * PAGE + seen % PAGE, blocks)
    tiles = [
        (row, at) for row, length in enumerate(lengths) for at in range(0, length * group, TILE)
    ]
    begins = [sum(lengths[:i]) for i in range(len(lengths))]
    fill = [[start] * len(lengths), [cached] * len(lengths), [0] * len(lengths)]
    columns = [*zip(*tiles, strict=True), begins, lengths, *fill]
    flat = torch.zeros(sum(lengths), dtype=torch.int32, device=device)
    if blocks is not None:
        for begin, length in zip(begins, lengths, strict=True):
            flat[begin : begin + length] = blocks[:length]
    tensors = [torch.tensor(x, dtype=torch.int32, device=device) for x in columns]
    return Rows(*tensors, flat, table[None].int()), span


def check_attention(device: Any) -> dict[str, float]:
    worst: dict[str, float] = {}
    cases = [
        ([64] * 8, 768, 768, None),
        ([64], 768, 768, 32),
        ([96, 64, 64], 100, 100, 32),
        ([33], 0, 0, None),
        ([64], 40 * PAGE + 5, 40 * PAGE + 5, None),  # more pages than are looked up at once
        ([1], PAGE, PAGE, None),
        ([32], 200, 64, None),
    ]
    for heads, kv_heads, dim in ((28, 4, 128), (7, 1, 64), (8, 8, 32)):
        for lengths, cached, start, size in cases:
            rows, span = layout(lengths, cached, start, size, heads // kv_heads, device)
            cache_tokens = PAGE * (max(1, -(-cached // PAGE)) + 2)
            tokens = sum(lengths)
            wide = [
                torch.randn(n, h, dim, device=device)
                for n, h in (
                    (tokens, heads),
                    *[(tokens, kv_heads)] * 2,
                    *[(cache_tokens, kv_heads)] * 2,
                )
            ]
            # fp32 takes long to compile: one shape of it
            for dtype in (torch.bfloat16, torch.float32)[: 2 if dim == 64 else 1]:
                given = [x.to(dtype) for x in wide]
                plain = reference_batch(*[x.float() for x in given], [span])
                name = f"attention {str(dtype).removeprefix('torch.')}"
                found = {
                    name: max(error(attend(*given, rows, splits=s), plain) for s in (1, 4)),
                    f"{name}, of torch's sdpa": error(sdpa_batch(*given, [span]), plain),
                    f"{name}, of rounding alone": error(plain.to(dtype), plain),
                }
                worst |= {key: max(worst.get(key, 0.0), value) for key, value in found.items()}
    return worst


def check_pointwise(device: Any) -> dict[str, float]:
    worst: dict[str, float] = {}
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.randn(37, 3584, device=device).to(dtype)
        delta, weight = torch.randn_like(x), torch.randn(3584, device=device).to(dtype)
        total = x.float() + delta.float()
        plain = total.to(dtype).float()
        plain = plain * torch.rsqrt(plain.square().mean(-1, keepdim=True) + 1e-6) * weight.float()
        name = str(dtype).removeprefix("torch.")
        worst[f"norm {name}"] = error(pointwise.norm(x.clone(), delta, weight, 1e-6, None), plain)
        gate_up = torch.randn(37, 2 * 18944, device=device).to(dtype)
        gate, up = gate_up.float().chunk(2, dim=1)
        active = F.silu(gate) * up
        worst[f"activate {name}"] = error(pointwise.activate(gate_up, None), active)
        for kind_name, kind in KINDS.items():
            ours = pointwise.quantize_rows(x, kind)
            same = (ours.values.float() == quantize_rows(x, kind).values.float()).float().mean()
            worst[f"quantize {kind_name} {name}: differing"] = 1 - float(same)
            for what, scaled, expected in (
                ("norm", pointwise.norm(x.clone(), delta, weight, 1e-6, kind), plain),
                ("activate", pointwise.activate(gate_up, kind), active),
            ):
                back = scaled.values.float() * scaled.scale
                worst[f"{what} to {kind_name} {name}"] = error(back, expected)
    return worst


def check_quantized(device: Any) -> dict[str, float]:
    worst: dict[str, float] = {}
    for tokens in (17, 64, 512):
        linear = torch.nn.Linear(3584, 4608, device=device, dtype=torch.bfloat16)
        x = torch.randn(tokens, 3584, device=device).bfloat16()
        plain = F.linear(x.float(), linear.weight.float(), linear.bias.float())
        for name, kind in KINDS.items():
            layer = QuantizedLinear(linear, kind)
            worst[f"product {name}, {tokens} tokens, against fp32"] = error(layer(x), plain)
            values = quantize_rows(x, kind)
            back = (values.values.double() @ layer.weight.double().T).float()
            back = back * values.scale * layer.scale.T + linear.bias.float()
            worst[f"product {name}, {tokens} tokens, against itself"] = error(layer(x), back)
            ours = scaled_matmul(*values, layer.weight, layer.scale, linear.bias, torch.bfloat16)
            worst[f"our product {name}, {tokens} tokens, against itself"] = error(ours, back)
    return worst


def check_swiglu_gemm(device: Any) -> dict[str, float]:
    """In a graph its x is computed by the kernel just before it, for which it has to wait."""
    if not available(device):
        print("check_swiglu_gemm: this device has no such kernel")
        return {}
    found: dict[str, float] = {}
    shapes = (
        (2 * 18944, 3584, True),
        (2 * 12288, 4096, True),
        (152064, 3584, False),
        (126464, 4096, False),  # its last tile is not whole
    )
    for rows, inner, gated in shapes:
        weight = (0.02 * torch.randn(rows, inner, device=device)).bfloat16()
        for tokens in (192, 225, 256, 320, 380, 416, 500, 512, 640, 1024):
            x = torch.randn(tokens, inner, device=device).bfloat16()
            if not supports(x, weight, gated=gated):
                continue  # another number of multiprocessors has other sizes
            plain = F.linear(x.float(), weight.float())
            if gated:
                gate, up = plain.chunk(2, dim=1)
                plain = F.silu(gate) * up
            # The result is allocated where this was, so that what is not written is NaN.
            torch.full(plain.shape, torch.nan, device=device, dtype=torch.bfloat16)
            name = f"{'swiglu gemm' if gated else 'plain gemm'}, {tokens} tokens, {rows} rows"
            first = swiglu_gemm(x, weight, gated=gated)
            found[name] = error(first, plain)

            def just_made(x: Tensor = x, weight: Tensor = weight, gated: bool = gated) -> Tensor:
                given = torch.full_like(x, torch.nan)
                torch.mul(x, 1, out=given)
                return swiglu_gemm(given, weight, gated=gated)

            found[f"{name}: differing"] = float(differing(just_made, first))
    return found or {"swiglu gemm: no shape is supported": float("nan")}


def add_outliers(groups: Tensor) -> None:
    """To every record of [groups, 2, 8, inner]: a small weight, a zero and a large one."""
    count, chunks = len(groups), groups.shape[3] // 64
    for scale in (2.0**-20, 0.0, 2.0**9):
        half, row, column = (
            torch.randint(size, (count, chunks), device=groups.device) for size in (2, 8, 64)
        )
        record = torch.arange(count, device=groups.device)[:, None]
        column += 64 * torch.arange(chunks, device=groups.device)
        groups[record, half, row, column] *= scale


def check_compressed(device: Any) -> dict[str, float]:
    """Also with outliers, and with blocks that do not wait for one another."""
    if not available(device):
        print("check_compressed: this device has no such kernel")
        return {}
    found: dict[str, float] = {}
    shapes = {"gate_up": (37888, 3584), "down": (3584, 18944), "head": (152064, 3584)}
    shapes |= {"gate_up of LLaDA": (24576, 4096), "down of LLaDA": (4096, 12288)}
    shapes |= {"gate_up, split": (19456, 2560)}
    for name, (rows, inner) in shapes.items():
        gated = name.startswith("gate_up")
        weight = (0.02 * torch.randn(rows, inner, device=device)).bfloat16()
        add_outliers(arrange_rows(weight, gated=gated))
        compressed = compress(weight, gated=gated)
        if compressed is None:
            found[f"compressed {name}: nothing"] = float("nan")
            continue
        for tokens in (1, 40, 64):
            x = torch.randn(tokens, inner, device=device).bfloat16()
            plain = F.linear(x.float(), weight.float())
            if gated:
                gate, up = plain.chunk(2, dim=1)
                plain = F.silu(gate) * up
            # The result is allocated where this was, so that what is not written is NaN.
            torch.full((tokens, compressed.columns), torch.nan, device=device, dtype=torch.bfloat16)
            first = compressed(x)
            found[f"compressed {name}, {tokens} tokens"] = error(first, plain)

            def just_made(x: Tensor = x, weight: CompressedWeight = compressed) -> Tensor:
                weight(2 * x)  # leaves other partial sums in the same memory
                given = torch.full_like(x, torch.nan)
                torch.mul(x, 1, out=given)
                return weight(given)

            others = differing(just_made, first)
            found[f"compressed {name}, {tokens} tokens: differing"] = float(others)
        for polls in (0, 1, 8) if compressed.tiling.split > 1 else ():
            tiling = compressed.tiling._replace(polls=polls)
            hasty = CompressedWeight(tiling, compressed.data, compressed.columns, inner)

            def after_another(x: Tensor = x, weight: CompressedWeight = hasty) -> Tensor:
                weight(2 * x)
                return weight(x)

            others = differing(after_another, first)
            found[f"compressed {name}, {polls} polls: differing"] = float(others)
        if not gated:  # the weight itself, column by column
            wrong = 0
            for k in range(0, inner, 64 * 7):
                one = torch.zeros(64, inner, device=device, dtype=torch.bfloat16)
                one[:, k : k + 64] = torch.eye(64, device=device)
                wrong += int((weight[:, k : k + 64] != compressed(one).T).sum())
            found[f"compressed {name}: weights differing"] = float(wrong)
    return found


def differing(work: Callable[[], Tensor], first: Tensor) -> int:
    """How often its result is not bitwise the first one, repeated in a graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = [work() for _ in range(20)]
    found = 0
    for _ in range(10):
        for one in again:
            one.fill_(torch.nan)  # what is not written stays so
        graph.replay()
        torch.cuda.synchronize()
        found += sum(not torch.equal(one, first) for one in again)
    return found


def check_splits(device: Any) -> dict[str, float]:
    """Products whose inner axis is split: always the same bits."""
    others, wrong = 0, 0.0
    for tokens in (64, 128, 256):
        for kind in KINDS.values():
            x = quantize_rows(torch.randn(tokens, 18944, device=device), kind)
            w = quantize_rows(torch.randn(3584, 18944, device=device), kind)
            work = partial(scaled_matmul, *x, *w, None, torch.bfloat16)
            first = work()
            plain = (x.values.double() @ w.values.double().T) * x.scale * w.scale.T
            wrong = max(wrong, error(first, plain))
            others += differing(work, first)
    return {"split products: against fp64": wrong, "split products: differing": others}


def check_merges(device: Any) -> dict[str, float]:
    """Attention whose keys are split: always the same bits."""
    others = 0
    for lengths in ([64], [64, 64, 37, 64], [1, 5]):
        rows, _ = layout(lengths, 768, 768, None, 7, device)
        shapes = (sum(lengths), 28), *[(sum(lengths), 4)] * 2, *[(PAGE * 14, 4)] * 2
        given = [torch.randn(n, h, 128, device=device).bfloat16() for n, h in shapes]
        for splits in (2, 4):
            work = partial(attend, *given, rows, splits=splits)
            others += differing(work, work())
    return {"split attention: differing": others}


def check_table(device: Any) -> dict[str, float]:
    """The cuBLASLt table of this device, with two biases in one graph where a shape has one."""
    table = cublaslt_table(device)
    worst = 0.0
    for shape in table.algorithms:
        weight = torch.randn(shape.columns, shape.inner, device=device).bfloat16()
        x = torch.randn(shape.tokens, shape.inner, device=device).bfloat16()
        biases = [
            torch.randn(shape.columns, device=device).bfloat16() if shape.bias else None
            for _ in range(2)
        ]
        table(x, weight, biases[0])
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = [table(x, weight, bias) for bias in biases]
        graph.replay()
        for ours, bias in zip(found, biases, strict=True):
            wide = None if bias is None else bias.float()
            worst = max(worst, error(ours, F.linear(x.float(), weight.float(), wide)))
    name = torch.cuda.get_device_name(device)
    version = table.library.version if table.library else 0
    left_out = len(algorithms_of(all_entries(), name, version)) - len(table.algorithms)
    return {"cuBLASLt table": worst, "cuBLASLt table: left out": float(left_out)}


def check_rounds(device: Any) -> dict[str, float]:
    """The same tokens with graphs as without, where commits are written at once.

    With overlapped rounds, several requests at once, an aborted one, and cached prompts.
    """
    found: dict[str, float] = {}
    for attention in ("full", "block"):
        for name, count in _check_rounds(device, attention).items():
            found[name] = found.get(name, 0.0) + count
    return found


def _run_all(engine: Any, llm: LLM, prompts: list[list[int]], config: Any) -> tuple[Any, int]:
    """The tokens of all, and how many rounds were in flight at once."""
    sessions = [llm.session(prompt, config) for prompt in prompts]
    for session in sessions:
        engine.add(session)
    in_flight = 0
    while engine.busy:
        engine.step()
        in_flight = max(in_flight, len(engine.in_flight))
    return [s.output.token_ids for s in sessions if s.output], in_flight


def _check_rounds(device: Any, attention: Any) -> dict[str, float]:
    llm = LLM("dummy:dream-tiny", device=str(device), dtype="float32", cache_tokens=8192)
    prompts = [[1 + (7 * i + j) % 200 for j in range(5 + 20 * i)] for i in range(8)]
    prompts += prompts[2:5]
    config = DecodeConfig(branches=3, block_size=8, max_new_tokens=32, attention=attention)
    usual = llm.runner
    eager = partial(TritonBackend, graphs=False)
    llm.runner = PagedRunner(llm.model, 8192, backend=eager, reuse="off")
    alone = [llm.generate(prompt, config).token_ids for prompt in prompts]
    llm.runner = usual
    engine = llm.engine(max_running=3)
    sessions = [llm.session(prompt, config) for prompt in prompts]
    for session in sessions:
        engine.add(session)
    engine.step()
    engine.abort(sessions[1])
    while engine.busy:
        engine.step()
    ahead = [llm.generate(prompt, config).token_ids for prompt in prompts]
    even = RoundCost(((1, 1e-4), (10_000, 1.0)), (1e-5,) * 5, in_halves=True)
    all_at_once, _ = _run_all(Scheduler(llm.runner), llm, prompts, config)
    in_halves, in_flight = _run_all(Scheduler(llm.runner, cost=even), llm, prompts, config)
    warm = LLM(
        "dummy:dream-tiny", device=str(device), dtype="float32", cache_tokens=8192, warmup=256
    )
    backend = warm.runner.backend

    def captured() -> set[object]:
        graphs = backend._lanes[0].graphs
        return {*graphs.layers, *graphs.heads}

    ready = captured()
    same = warm.generate(prompts[0], config).token_ids == alone[0]
    together = [s.output.token_ids if s.output else alone[1] for s in sessions]
    return {
        "overlapped rounds": float(sum(a != b for a, b in zip(ahead, alone, strict=True))),
        "many at once": float(sum(a != b for a, b in zip(together, alone, strict=True))),
        "all at once": float(sum(a != b for a, b in zip(all_at_once, alone, strict=True))),
        "in two halves": float(sum(a != b for a, b in zip(in_halves, alone, strict=True))),
        "in two halves: not in flight together": float(in_flight != 2),
        "warmed up: graphs that were missing": float(len(captured() - ready)),
        "warmed up: answers that differ": float(not same),
    }


def check_confidence(device: Any) -> dict[str, float]:
    worst: dict[str, float] = {}
    for temperature, early_stop in ((0.0, True), (0.8, True), (0.8, False)):
        for ranking in RANKINGS:
            logits = 4 * torch.randn(70, 152064, device=device)
            positions = torch.randint(0, 1000, (70,), device=device)
            config = DecodeConfig(
                ranking=ranking,  # type: ignore[arg-type]
                temperature=temperature,
                seed=5,
                early_stop=early_stop,
            )
            token, max_prob, rank = plain_statistics(logits, positions, 7, config)
            own = 5, config.tempers_confidence, RANKINGS[ranking]
            rows = [positions, *(torch.full_like(positions, n) for n in own)]
            out = torch.zeros(3, 70, dtype=torch.int32, device=device)
            heat = torch.full((70,), temperature, device=device)
            settings = torch.stack(rows, 1)
            confidence(logits, settings, heat, 7, out, sampling=temperature > 0)
            worst["confidence: tokens differing"] = max(
                worst.get("confidence: tokens differing", 0.0),
                float((out[0] != token).float().mean()),
            )
            for name, ours, plain in (("max_prob", out[1], max_prob), (ranking, out[2], rank)):
                found = float((ours.view(torch.float32) - plain).abs().max())
                worst[f"confidence {name}: largest difference"] = found
    return worst


def times(llm: LLM, tokens: int, window: int, prefix: int) -> dict[str, float]:
    """Microseconds of each operation of a layer, and of the head."""
    config, device = llm.config, llm.device
    layers: list[Any] = list(llm.model.layers)
    count = len(layers)
    x = torch.randn(tokens, config.hidden_size, device=device).to(llm.dtype)
    wide = torch.randn(tokens, config.intermediate_size, device=device).to(llm.dtype)
    gate_up = torch.randn(tokens, 2 * config.intermediate_size, device=device).to(llm.dtype)
    found: dict[str, float] = {}

    def measure(name: str, work: Callable[[int], object], layers: int = count) -> None:
        found[name] = round(microseconds(work, layers), 2)

    products = {
        "qkv": (lambda layer: layer.attention.qkv, x),
        "out": (lambda layer: layer.attention.out, x),
        "gate_up": (lambda layer: layer.feed_forward.gate_up, x),
        "down": (lambda layer: layer.feed_forward.down, wide),
    }
    for name, (part, given) in products.items():
        linear = part(layers[0])
        if isinstance(linear, QuantizedLinear):
            scaled = pointwise.quantize_rows(given, linear.kind)
            measure(name, lambda i, p=part, s=scaled: p(layers[i])(s))
        else:
            measure(name, lambda i, p=part, g=given: p(layers[i])(g))
    kind = getattr(layers[0].feed_forward.down, "kind", None)
    weight = layers[0].attention_norm.weight
    measure("norm", lambda i: pointwise.norm(x, x, weight, 1e-6, kind))
    measure("activate", lambda i: pointwise.activate(gate_up, kind))
    if kind is None:
        table = cublaslt_table(device)
        weights = [layer.feed_forward.gate_up.weight for layer in layers]
        measure("gate_up and activate", lambda i: pointwise.activate(table(x, weights[i]), None))
        if supports(x, weights[0], gated=True):
            measure("swiglu gemm", lambda i: swiglu_gemm(x, weights[i], gated=True))
        head_weight = llm.model.head_weight
        if supports(x, head_weight, gated=False):
            measure("head, plain gemm", lambda i: swiglu_gemm(x, head_weight, gated=False), 1)
        for name, given in (("gate_up", x), ("down", wide)):
            owned = [getattr(layer.feed_forward, name) for layer in layers]
            if all(isinstance(o, CompressedLinear) and o.compressed.supports(given) for o in owned):
                measure(f"{name}, compressed", lambda i, o=owned, g=given: o[i].compressed(g))
        head = getattr(llm.model, "head", None)
        if isinstance(head, CompressedLinear) and head.compressed.supports(x):
            measure("head, compressed", lambda i: head.compressed(x), 1)
    if kind is not None:
        measure("quantize", lambda i: pointwise.quantize_rows(x, kind))
    width = (config.heads + 2 * config.kv_heads) * config.head_dim
    qkv = torch.randn(tokens, width, device=device).to(llm.dtype)
    keys = torch.empty(tokens, config.kv_heads, config.head_dim, device=device, dtype=llm.dtype)
    values = torch.randn_like(keys)
    angles = torch.randn(tokens, config.head_dim, device=device).to(llm.dtype)
    measure(
        "rotate",
        lambda i: pointwise.rotate(qkv, angles, angles, None, 1e-6, keys, values, config.heads),
    )
    group = config.heads // config.kv_heads
    lengths = [window] * (tokens // window)
    q = qkv.view(tokens, -1, config.head_dim)[:, : config.heads]
    cache = llm.runner.kv_cache
    rows, _ = layout(lengths, prefix, prefix, None, group, device)
    for splits in (1, 2, 4):

        def mix(i: int, splits: int = splits) -> Tensor:
            return attend(q, keys, values, cache.keys[i], cache.values[i], rows, splits=splits)

        measure(f"attention / {splits}", mix)
    measure("head", lambda i: llm.model.logits(x), 1)
    logits = llm.model.logits(x)
    settings = torch.full((tokens, 4), 2, device=device, dtype=torch.int64)
    out = torch.zeros(3, tokens, dtype=torch.int32, device=device)
    heat = torch.zeros(tokens, device=device)

    def find(_: int) -> None:
        confidence(logits, settings, heat, config.mask_id, out, sampling=False)

    measure("confidence", find, 1)
    return found


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="dummy:dream-7b")
    parser.add_argument("--tokens", default="64,128,256,384,512")
    parser.add_argument("--window", type=int, default=64)
    parser.add_argument("--prefix", type=int, default=768)
    parser.add_argument("--quantize", default="none,fp8,int8")
    parser.add_argument("--checks-only", action="store_true")
    options = parser.parse_args()
    device = torch.device("cuda")
    torch.manual_seed(0)
    worst: dict[str, float] = {}
    checks = (
        check_attention,
        check_pointwise,
        check_quantized,
        check_splits,
        check_merges,
        check_table,
        check_swiglu_gemm,
        check_compressed,
        check_confidence,
        check_rounds,
    )
    for check in checks:
        worst |= check(device)
        print(f"{check.__name__}: done", flush=True)
    for name, value in worst.items():
        print(f"{value:10.2e}  {name}")
    limits = {"attention bfloat16": 5e-3, "attention float32": 1e-5}
    limits |= {
        name: 3e-3 for name in worst if name.startswith(("swiglu gemm", "plain gemm", "compressed"))
    }
    bad = [n for n, v in worst.items() if not v < limits.get(n, 6e-2)]
    print("wrong: " + ", ".join(bad) if bad else "all right")
    if options.checks_only:
        sys.exit(bool(bad))
    for quantize in options.quantize.split(","):
        llm = LLM(
            options.model,
            device="cuda",
            dtype="bfloat16",
            quantize=None if quantize == "none" else quantize,
            cache_tokens=65536,
        )
        for tokens in map(int, options.tokens.split(",")):
            line = {"quantize": quantize, "tokens": tokens}
            print(json.dumps(line | times(llm, tokens, options.window, options.prefix)), flush=True)
        del llm
        torch.cuda.empty_cache()
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
