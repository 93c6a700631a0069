"""Mixtures of experts on a GPU: checks, tile shapes, and rounds against the bytes they must read.

    python measurements/experts.py [checks tiles parts rounds flash …] [--out FILE]

checks: every kernel against plain torch on random inputs; whole decodes of tiny models. tiles: the
two products with several tilings at the model's shape, the fastest marked. parts: each kernel of a
layer. rounds: whole forwards of rows of random tokens behind a prefix, bf16 and fp8. flash: the
100B shape in fp8, loaded layer by layer. Without a name all of them run. Lines of JSON go to FILE.

Times are medians. Those of one layer are of a graph that runs the operation once for each layer
with that layer's own weights, so that the L2 cache holds no more than in a round. Experts are
chosen by the router from random activations; how many are touched is printed beside the time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from graph_time import microseconds
from kernels import differing, error
from lopa import LLM, DecodeConfig
from lopa.bench.ceilings import Ceilings, measure
from lopa.bench.round_work import RoundWork, TouchedExperts
from lopa.kernels.fast_mixture import mixture
from lopa.kernels.quantize import KINDS, QuantizedExperts, quantize_layer
from lopa.kernels.scaled import quantize_rows
from lopa.kernels.triton import experts as products
from lopa.kernels.triton import pointwise
from lopa.kernels.triton.experts import Tiling
from lopa.kernels.triton.pointwise import Weighted
from lopa.kernels.triton.routing import group, route, tile_size
from lopa.models import checkpoint, llada2, sdar_moe
from lopa.models.config import MixtureConfig
from lopa.models.feed_forward import Where
from lopa.models.mixture import Experts, Mixture, Router
from lopa.models.transformer import Layer
from lopa.models.transformer import _rotate as plain_rotate
from lopa.runner.device_timer import DeviceTimer
from lopa.types import Plan

MODEL = "dummy:llada2-mini"
PREFIX = 768
ROUNDS = ((1, 32), (8, 32), (1, 64), (8, 64))
TOKENS = (32, 256, 512)  # of those rounds
# (columns, inner, warps, stages)
GATE_UP: dict[str, list[tuple[int, int, int, int]]] = {
    "bf16": [(64, 64, 4, 3), (64, 64, 4, 4), (64, 128, 4, 3), (128, 64, 4, 3), (128, 64, 8, 4)],
    "fp8": [(128, 64, 4, 4), (128, 128, 4, 2), (128, 128, 4, 3), (128, 128, 8, 3)],
}
DOWN: dict[str, list[tuple[int, int, int, int]]] = {
    "bf16": [(64, 64, 4, 4), (128, 64, 4, 3), (128, 64, 4, 4), (128, 128, 4, 3), (256, 64, 8, 3)],
    "fp8": [(128, 128, 4, 3), (128, 128, 4, 4), (128, 128, 8, 4), (256, 128, 8, 3)],
}


# -- checks -----------------------------------------------------------------------------------


def config_of(name: str) -> MixtureConfig:
    found = checkpoint.model_config(name).mixture
    assert found is not None
    return found


def a_router(config: MixtureConfig, hidden: int, device: Any) -> Router:
    router = Router(config, hidden, Where(device, torch.float32)).requires_grad_(False)
    router.weight.normal_(0.0, hidden**-0.5)
    if router.bias is not None:
        router.bias.normal_(0.0, 0.05)
    return router


def in_fp64(router: Router, x: Tensor) -> tuple[Tensor, Tensor]:
    """The same router in double precision."""
    twin = Router(router.config, x.shape[1], Where(x.device, torch.float64)).requires_grad_(False)
    twin.weight.copy_(router.weight)
    if router.bias is not None and twin.bias is not None:
        twin.bias.copy_(router.bias)
    found: tuple[Tensor, Tensor] = twin(x)
    return found


def number(count: int, device: Any) -> Tensor:
    return torch.tensor([count], dtype=torch.int32, device=device)


def check_routing(device: Any, sizes: tuple[int, ...]) -> dict[str, float]:
    """Shares of tokens with another set of experts than in fp64; torch's in fp32 beside them."""
    found: dict[str, float] = {}
    for name, hidden in (("llada2-mini", 2048), ("sdar-30b-a3b", 2048), ("llada2-flash", 4096)):
        config = config_of(f"dummy:{name}")
        router = a_router(config, hidden, device)
        k = config.per_token
        wrong, total, far = dict.fromkeys(("ieee", "tf32x3", "torch"), 0), 0, 0.0
        for tokens in sizes:
            x = torch.randn(tokens, hidden, device=device).bfloat16()
            truth, exact = in_fp64(router, x)
            order = truth.argsort(1)
            sets, total = truth.sort(1).values, total + tokens
            others = {"torch": router(x)}
            for precision in ("ieee", "tf32x3"):
                others[precision] = route(
                    x,
                    router.weight,
                    router.bias,
                    config,
                    number(tokens, device),
                    nowhere=config.experts,
                    precision=precision,
                )
            for kind, (chosen, weights) in others.items():
                chosen, weights = chosen[:, :k].long(), weights[:, :k]
                same = (chosen.sort(1).values == sets).all(1)
                wrong[kind] += int((~same).sum())
                ours = weights.gather(1, chosen.argsort(1))[same]
                if kind != "torch" and same.any():
                    far = max(far, float((ours - exact.gather(1, order)[same]).abs().max()))
        for kind, count in wrong.items():
            found[f"routing {name} {kind}: share with other experts"] = count / total
        found[f"routing {name}: weights"] = far
    return found


def check_grouping(device: Any, sizes: tuple[int, ...]) -> dict[str, float]:
    """Against a stable sort; also padding, and all tokens to one expert."""
    wrong = 0
    for tokens in sizes:
        for experts, choices in ((256, 9), (16, 4), (97, 8)):
            spread = torch.rand(tokens, experts, device=device).argsort(1)[:, :choices].int()
            padded = spread.clone()
            padded[tokens // 2 :] = experts
            one = torch.full((tokens, 1), experts // 2, dtype=torch.int32, device=device)
            for chosen in (spread, padded, one):
                for size in (16, 64):
                    wrong += not is_grouped(chosen, experts, size)
    return {"grouping: wrong": float(wrong)}


def is_grouped(chosen: Tensor, experts: int, size: int) -> bool:
    tiles = group(chosen, experts, size)
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat.long(), minlength=experts + 1)[:experts]
    ends = counts.cumsum(0)
    table = torch.stack([tiles.expert, tiles.begin, tiles.end], 1)[tiles.expert >= 0].long()
    expected = [
        (expert, begin, end)
        for expert, (count, end) in enumerate(zip(counts.tolist(), ends.tolist(), strict=True))
        for begin in range(end - count, end, size)
    ]
    return (
        torch.equal(tiles.order.long()[: int(ends[-1])], order[: int(ends[-1])])
        and torch.equal(tiles.counts.long(), counts)
        and [tuple(row) for row in table.tolist()] == expected
    )


def some_experts(experts: int, inner: int, hidden: int, device: Any) -> Experts:
    config = MixtureConfig(
        experts=experts, per_token=1, inner=inner, scoring="softmax", renormalise=True
    )
    found = Experts(config, hidden, Where(device, torch.bfloat16)).requires_grad_(False)
    for parameter in found.parameters():
        parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
    return found


def run_products(experts: Experts, x: Tensor, chosen: Tensor, size: int | None = None) -> Tensor:
    """[T, choices, hidden]; what is not written is NaN."""
    size = size or tile_size(chosen.numel(), experts.count)
    tiles = group(chosen, experts.count, size)
    scales: Any = (None, None)
    given: Any = x
    if isinstance(experts, QuantizedExperts):
        scales, given = experts.scales, pointwise.quantize_rows(x, experts.kind)
    active = products.gate_up(given, experts.stacks[0], scales[0], tiles, chosen.shape[1])
    out = torch.full((chosen.numel(), x.shape[1]), torch.nan, dtype=x.dtype, device=x.device)
    products.down(active, experts.stacks[1], scales[1], tiles, out)
    return out.view(*chosen.shape, -1)


def plain_products(experts: Experts, x: Tensor, chosen: Tensor) -> Tensor:
    """In fp32, expert by expert; of quantized ones with the same values."""
    out = torch.zeros(*chosen.shape, x.shape[1], device=x.device)
    for expert in range(experts.count):
        token, choice = (chosen == expert).nonzero(as_tuple=True)
        if not len(token):
            continue
        if isinstance(experts, QuantizedExperts):
            out[token, choice] = experts.run(expert, x[token]).float()
        else:
            both = x[token].float() @ experts.gate_up[expert].float().T
            gate, up = both.chunk(2, dim=1)
            out[token, choice] = (F.silu(gate) * up) @ experts.down[expert].float().T
    return out


def check_products(device: Any, sizes: tuple[int, ...]) -> dict[str, float]:
    found: dict[str, float] = {}
    shapes = ((256, 512, 2048), (128, 768, 2048), (16, 1024, 4096), (23, 80, 208))
    for experts, inner, hidden in shapes if device.type == "cuda" else shapes[-1:]:
        wide = some_experts(experts, inner, hidden, device)
        models: dict[str, Experts] = {"bf16": wide}
        models |= {name: QuantizedExperts(wide, kind) for name, kind in KINDS.items()}
        for name, model in models.items():
            key = f"experts {name}, {experts} of {hidden} by {inner}"
            for tokens in sizes:
                x = torch.randn(tokens, hidden, device=device).bfloat16()
                chosen = torch.rand(tokens, experts, device=device).argsort(1)[:, :8].int()
                if tokens == sizes[-1]:
                    chosen[: tokens // 2] = chosen[0]  # some experts get many tokens
                ours = run_products(model, x, chosen)
                plain = plain_products(model, x, chosen)
                found[key] = max(found.get(key, 0.0), error(ours, plain))
                if name != "bf16":
                    against = f"{key}, against bf16"
                    exact = plain_products(wide, x, chosen)
                    found[against] = max(found.get(against, 0.0), error(ours, exact))
                # The same bits for a token alone, and with larger tiles.
                alone = run_products(model, x[:1], chosen[:1])
                other = 32 if tile_size(chosen.numel(), experts) == 16 else 16
                again = run_products(model, x, chosen, other)
                differ = not torch.equal(alone, ours[:1]), not torch.equal(again, ours)
                for what, is_other in zip(("alone", "other tiles"), differ, strict=True):
                    here = f"experts {name}: differing {what}"
                    found[here] = found.get(here, 0.0) + is_other
            if device.type == "cuda":
                work = partial(run_products, model, x, chosen)
                found[f"{key}: differing"] = float(differing(work, work()))
    return found


def check_pointwise(device: Any, sizes: tuple[int, ...]) -> dict[str, float]:
    found: dict[str, float] = {}
    for dtype in (torch.bfloat16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        x, values = (
            torch.randn(n, 2048, device=device).to(dtype) for n in (sizes[1], 9 * sizes[1])
        )
        values, weights = values.view(-1, 9, 2048), torch.rand(sizes[1], 9, device=device)
        total = x + (values.float() * weights[:, :, None]).sum(1).to(dtype)
        plain = total.float()
        plain = plain * torch.rsqrt(plain.square().mean(-1, keepdim=True) + 1e-6)
        ones = torch.ones(2048, device=device, dtype=dtype)
        given = x.clone(), Weighted(values, weights), ones, 1e-6
        found[f"norm of experts {name}"] = error(pointwise.norm(*given, None), plain)
        both, scaled = pointwise.norm_both(x.clone(), *given[1:], torch.float8_e4m3fn)
        found[f"norm of experts, both, {name}"] = error(both, plain)
        found[f"norm of experts to fp8 {name}"] = error(scaled.values.float() * scaled.scale, plain)
        heads, kv_heads, dim, turned = 16, 4, 128, 64
        qkv = torch.randn(5, (heads + 2 * kv_heads) * dim, device=device).to(dtype)
        angles = torch.rand(5, turned // 2, device=device).repeat(1, 2)
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        q, k, v = qkv.clone().view(5, -1, dim).split([heads, kv_heads, kv_heads], dim=1)
        keys, stored = torch.full((2, 5, kv_heads, dim), torch.nan, device=device, dtype=dtype)
        pointwise.rotate(qkv, cos, sin, None, 1e-6, keys, stored, heads)
        for what, ours, theirs in (
            ("q", qkv.view(5, -1, dim)[:, :heads], plain_rotate(q, cos[:, None], sin[:, None])),
            ("k", keys, plain_rotate(k, cos[:, None], sin[:, None])),
            ("v", stored, v),
        ):
            found[f"RoPE of half a head {name}: {what}"] = error(ours, theirs)
    return found


def check_decodes(device: Any, sizes: tuple[int, ...]) -> dict[str, float]:
    """Whole answers of tiny mixtures in fp32, with graphs and several at once, against torch."""
    found: dict[str, float] = {}
    for family in (llada2.FAMILY, sdar_moe.FAMILY) if device.type == "cuda" else ():
        with tempfile.TemporaryDirectory() as folder:
            checkpoint.write_tiny(family, Path(folder))
            plain, ours = (
                LLM(folder, device=str(device), dtype="float32", backend=name, cache_tokens=8192)
                for name in ("sdpa", "triton")
            )
            prompts = [[1 + (7 * i + j) % 200 for j in range(5 + 9 * i)] for i in range(6)]
            for branches in (0, 1, 3, 7):
                config = plain.decode_config(decoder="lopa", branches=branches, max_new_tokens=32)
                expected = [plain.generate(prompt, config).token_ids for prompt in prompts]
                together = [one.token_ids for one in ours.generate(prompts, config)]
                alone = [ours.generate(prompt, config).token_ids for prompt in prompts]
                for what, given in (("together", together), ("alone", alone)):
                    key = f"decodes of {family.name}, {what}: differing"
                    others = sum(a != b for a, b in zip(given, expected, strict=True))
                    found[key] = found.get(key, 0.0) + others
    return found


def checks(device: Any) -> bool:
    sizes = (1, 33, 256, 1000) if device.type == "cuda" else (1, 9)
    worst: dict[str, float] = {}
    for check in (check_grouping, check_routing, check_products, check_pointwise, check_decodes):
        worst |= check(device, sizes)
        print(f"{check.__name__}: done", flush=True)
    for name, value in worst.items():
        print(f"{value:10.2e}  {name}")
    limits = {"differing": 1e-9, "against bf16": 8e-2, "fp8": 6e-2, "int8": 2e-2, "share": 2e-3}
    limits |= {"wrong": 1e-9, "weights": 1e-5, "float32": 1e-5}
    bad = []
    for name, value in worst.items():
        limit = next((limit for key, limit in limits.items() if key in name), 8e-3)
        if not value < limit:
            bad.append(name)
    print("wrong: " + "; ".join(bad) if bad else "all right")
    return not bad


# -- one layer --------------------------------------------------------------------------------


class Stack:
    """Layers of a model's mixture with random weights."""

    def __init__(self, kind: str, layers: int, device: Any) -> None:
        self.model, self.device = checkpoint.model_config(MODEL), device
        assert self.model.mixture is not None
        self.kind = None if kind == "bf16" else KINDS[kind]  # type: ignore[index]
        self.layers: list[Mixture] = []
        for _ in range(layers):
            layer = Layer(self.model, self.model.layers - 1, Where(device, torch.bfloat16))
            layer.requires_grad_(False)
            for name, parameter in layer.feed_forward.named_parameters():
                parameter.normal_(0.0, 0.05 if "bias" in name else parameter.shape[-1] ** -0.5)
            if kind != "bf16":
                quantize_layer(layer, kind)  # type: ignore[arg-type]
            assert isinstance(layer.feed_forward, Mixture)
            self.layers.append(layer.feed_forward)
        self.experts = len(self.layers[0].experts.stacks[0])  # the shared one included


class Given:
    """So many random tokens for each of the layers, and the operations on them, by layer."""

    def __init__(self, stack: Stack, tokens: int, size: int | None = None) -> None:
        self.stack, self.device = stack, stack.device
        hidden = stack.model.hidden_size
        self.x = torch.randn(tokens, hidden, device=self.device).bfloat16()
        self.scaled = None if stack.kind is None else quantize_rows(self.x, stack.kind)
        self.used = number(tokens, self.device)
        layers = range(len(stack.layers))
        self.chosen = [self.route(i)[0] for i in layers]
        self.choices = self.chosen[0].shape[1]
        self.size = size or tile_size(self.chosen[0].numel(), stack.experts)
        self.tiles = [self.group(i) for i in layers]
        self.active = [self.gate_up(i) for i in layers]
        self.out = torch.empty(
            tokens * self.choices, hidden, device=self.device, dtype=torch.bfloat16
        )
        self.counts = torch.zeros(stack.experts, dtype=torch.int32, device=self.device)
        self.ones = torch.ones(hidden, device=self.device, dtype=torch.bfloat16)
        self.found = self.mixture(0)

    @property
    def touched(self) -> float:
        counts = [int((one.counts > 0).sum()) for one in self.tiles]
        return statistics.mean(counts)

    @property
    def bytes(self) -> tuple[float, float]:
        """Of gate and up, and of down, of the experts that are touched."""
        model = self.stack.model
        assert model.mixture is not None
        half = self.touched * model.hidden_size * model.mixture.inner
        half *= 2 if self.stack.kind is None else 1
        return 2 * half, half

    def _scales(self, i: int) -> Any:
        experts = self.stack.layers[i].experts
        return experts.scales if isinstance(experts, QuantizedExperts) else (None, None)

    def route(self, i: int, precision: str | None = None) -> tuple[Tensor, Tensor]:
        router = self.stack.layers[i].router
        given = self.x, router.weight, router.bias, router.config, self.used
        return route(*given, nowhere=self.stack.experts, precision=precision)

    def levels_by_torch(self, i: int) -> Tensor:
        return F.linear(self.x.float(), self.stack.layers[i].router.weight)

    def group(self, i: int) -> Any:
        return group(self.chosen[i], self.stack.experts, self.size)

    def gate_up(self, i: int, tiling: Tiling | None = None) -> Any:
        weight, scale = self.stack.layers[i].experts.stacks[0], self._scales(i)[0]
        x = self.x if self.scaled is None else self.scaled
        return products.gate_up(x, weight, scale, self.tiles[i], self.choices, tiling=tiling)

    def down(self, i: int, tiling: Tiling | None = None) -> None:
        weight, scale = self.stack.layers[i].experts.stacks[1], self._scales(i)[1]
        products.down(self.active[i], weight, scale, self.tiles[i], self.out, tiling=tiling)

    def mixture(self, i: int) -> Weighted:
        return mixture(self.stack.layers[i], self.x, self.scaled, self.used, self.counts)

    def norm(self, i: int) -> Any:
        x = self.x.clone() if self.device.type == "cpu" else self.x
        return pointwise.norm(x, self.found, self.ones, 1e-6, self.stack.kind)


def timed(work: Callable[[int], object], candidates: Any, layers: int) -> dict[Tiling, float]:
    found = {}
    for one in candidates:
        tiling = Tiling(*one)
        try:
            found[tiling] = microseconds(partial(work, tiling=tiling), layers)
        except Exception as failure:  # a tiling that does not fit the device is no candidate
            print(f"{tiling}: {type(failure).__name__}: {failure}")
    return found


def tiles(device: Any, say: Callable[..., None]) -> None:
    for kind in ("bf16", "fp8"):
        stack = Stack(kind, 6, device)
        for tokens in TOKENS:
            usual = Given(stack, tokens).size
            for size in (usual, 2 * usual):
                given = Given(stack, tokens, size)
                for name, work, candidates, read in (
                    ("gate_up", given.gate_up, GATE_UP[kind], given.bytes[0]),
                    ("down", given.down, DOWN[kind], given.bytes[1]),
                ):
                    found = timed(work, candidates, len(stack.layers))
                    best = min(found, key=lambda tiling, f=found: f[tiling])
                    for tiling, spent in found.items():
                        say(
                            what=f"tiles {name}",
                            kind=kind,
                            tokens=tokens,
                            tile=size,
                            tiling=list(tiling),
                            us=round(spent, 1),
                            tb_s=round(read / spent / 1e6, 2),
                            touched=round(given.touched, 1),
                            best=tiling == best,
                        )
        del stack, given, work
        torch.cuda.empty_cache()


def parts(device: Any, say: Callable[..., None]) -> None:
    """Each kernel of a layer as it runs by default, in µs."""
    for kind in ("bf16", "fp8"):
        stack = Stack(kind, 6, device)
        for tokens in (*TOKENS, 1024):
            given = Given(stack, tokens)
            measured: dict[str, Callable[[int], object]] = {
                "route": given.route,
                "route, ieee": partial(given.route, precision="ieee"),
                "torch's fp32 product": given.levels_by_torch,
                "group": given.group,
                "gate_up": given.gate_up,
                "down": given.down,
                "mixture": given.mixture,
                "norm": given.norm,
            }
            say(
                what="parts",
                kind=kind,
                tokens=tokens,
                touched=round(given.touched, 1),
                floor_us=round(sum(given.bytes) / CEILINGS.bytes_per_second * 1e6, 1),
                **{
                    name: round(microseconds(work, len(stack.layers)), 1)
                    for name, work in measured.items()
                },
            )
        del stack, given, measured
        torch.cuda.empty_cache()


# -- whole rounds -----------------------------------------------------------------------------


def rows_of(llm: LLM, rows: int, window: int, *, alike: bool) -> Plan:
    """Random tokens behind the prefix; alike: rows differ in one token, as branches do."""
    generator = np.random.default_rng(rows * window)
    tokens = generator.integers(0, llm.config.vocab_size // 2, (rows, window))
    if alike:
        tokens[:] = tokens[0]
        for row in range(rows - 1):
            tokens[row, row] += 1
    ends, wanted = np.full(rows, PREFIX + window), np.ones((rows, window), np.bool_)
    return Plan(1, PREFIX, PREFIX, 0, tokens, ends, wanted, None)


def time_round(llm: LLM, plan: Plan, repeats: int = 40) -> tuple[float, float]:
    """Median milliseconds of the device's forward, and of launching and waiting for it."""
    runner: Any = llm.runner
    slot = runner.open(DecodeConfig(), PREFIX + plan.rows.shape[1])
    assert slot is not None
    runner.launch([(slot, plan)]).wait()  # captures its graphs
    runner.backend.timer = timer = DeviceTimer()
    forwards, walls = [], []
    for _ in range(repeats):
        began = time.perf_counter()
        runner.launch([(slot, plan)]).wait()
        walls.append(time.perf_counter() - began)
        if (found := timer.take()) is not None:
            forwards.append(found.forward)
    runner.backend.timer = None
    runner.close(slot)
    return 1e3 * statistics.median(forwards or walls), 1e3 * statistics.median(walls)


def time_rounds(llm: LLM, kind: str, sizes: Any, say: Callable[..., None]) -> None:
    for cache in (llm.runner.kv_cache.keys, llm.runner.kv_cache.values):
        cache.normal_()
    counter = TouchedExperts(llm.model, llm.runner.backend)
    for rows, window in sizes:
        for alike in (False, True) if rows > 1 else (False,):
            forward, wall = time_round(llm, rows_of(llm, rows, window, alike=alike))
            spread = counter.take()
            counts = [count[:-1].float() for count in llm.runner.backend.expert_counts.values()]
            busiest = statistics.mean(float(count.max() / count.mean()) for count in counts)
            quantised = kind != "bf16"
            work = RoundWork.of(
                llm.config,
                torch.bfloat16,
                rows=rows,
                window=window,
                prefix=PREFIX,
                touched=spread,
                is_quantised=quantised,
            )
            ceilings = CEILINGS
            if quantised:  # the experts' rate is no limit at these sizes
                ceilings = replace(ceilings, quantised_flops_per_second=1400e12)
            floor = 1e3 * ceilings.floor(work)
            say(
                what=f"round of {llm.name}",
                kind=kind,
                rows=rows,
                window=window,
                alike=alike,
                forward_ms=round(forward, 3),
                wall_ms=round(wall, 3),
                floor_ms=round(floor, 3),
                ratio=round(forward / floor, 3),
                touched=spread,
                busiest=round(busiest, 1),  # tokens of the busiest expert over the mean
                gigabytes=round(work.bytes / 1e9, 2),
            )


def rounds(device: Any, say: Callable[..., None]) -> None:
    for kind, sizes in (("bf16", ROUNDS), ("fp8", ROUNDS)):
        began = time.perf_counter()
        llm = LLM(
            MODEL,
            device=str(device),
            dtype="bfloat16",
            quantize=None if kind == "bf16" else kind,
            cache_tokens=16384,
        )
        print(f"loaded in {time.perf_counter() - began:.1f} s", flush=True)
        time_rounds(llm, kind, sizes, say)
        del llm
        torch.cuda.empty_cache()


def flash(device: Any, say: Callable[..., None]) -> None:
    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    llm = LLM(
        "dummy:llada2-flash",
        device=str(device),
        dtype="bfloat16",
        quantize="fp8",
        cache_tokens=8192,
    )
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    peak, held = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
    say(what="flash loaded", seconds=round(seconds, 1), peak_gb=peak / 1e9, held_gb=held / 1e9)
    time_rounds(llm, "fp8", ((1, 32), (8, 32)), say)


PARTS: dict[str, Callable[[Any, Callable[..., None]], None]] = {
    "tiles": tiles,
    "parts": parts,
    "rounds": rounds,
    "flash": flash,
}
CEILINGS = Ceilings(4.3e12, 790e12)  # measured again below


@torch.inference_mode()
def main() -> None:
    global CEILINGS
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", default=["checks", *PARTS])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if unknown := set(options.parts) - {"checks", *PARTS}:
        parser.error(f"no part {unknown.pop()}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    is_right = True
    lines: list[dict[str, Any]] = []

    def say(**line: Any) -> None:
        lines.append(line)
        print(" ".join(f"{key}={value}" for key, value in line.items()), flush=True)
        if options.out:
            options.out.write_text("".join(json.dumps(one) + "\n" for one in lines))

    if device.type == "cuda":
        CEILINGS = measure(device, torch.bfloat16, None)
        say(what="ceilings", bytes=CEILINGS.bytes_per_second, flops=CEILINGS.flops_per_second)
    for part in options.parts:
        if part == "checks":
            is_right = checks(device)
        else:
            PARTS[part](device, say)
    best = [line for line in lines if line.get("best") or line["what"].startswith("round")]
    for line in best:
        print(json.dumps(line))
    sys.exit(not is_right)


if __name__ == "__main__":
    main()
