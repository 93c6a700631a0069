"""Attention of a round behind a long prefix: the kernel of rounds alone, and with cuDNN.

    python measurements/prefix_attention.py

Dream-7B's shape in bf16. First both are checked against fp32 on random batches, then timed: µs of
one layer in a graph of several, each with its own cache, and TFLOP/s. Last, what the steps with
cuDNN take, and how long cuDNN takes to plan for sizes that it has not seen.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from graph_time import microseconds
from kernels import error, layout
from lopa.kernels import compilation
from lopa.kernels.prefix_attention import CHUNK, FarPart, attend_far
from lopa.kernels.triton.attention import Rows, attend, most_tiles
from lopa.runner.attention import Span, reference, reference_batch
from lopa.runner.kv_cache import PAGE

HEADS, KV_HEADS, DIM, DTYPE = 28, 4, 128, torch.bfloat16
LAYERS = 8  # of a graph
MOST_WRONG = 5e-3
CASES = ((8, 32768), (8, 36863), (8, 16384), (16, 32768), (4, 32768), (2, 32768), (1, 32768))
# Lengths, cached, start, block size
CHECKS = (
    ([64] * 8, 8 * CHUNK, 8 * CHUNK, None),
    ([64] * 8, 8 * CHUNK + 1, 8 * CHUNK + 1, None),
    ([64] * 8, 9 * CHUNK - 1, 9 * CHUNK - 1, 32),
    ([64] * 4, 4 * CHUNK + 3 * PAGE, 4 * CHUNK + 3 * PAGE, None),
    ([64, 64, 37, 11], 4 * CHUNK + 500, 4 * CHUNK + 500, 32),
    ([64], 8 * CHUNK + 77, 8 * CHUNK + 77, None),
    ([96] * 3, 5 * CHUNK, 4 * CHUNK + 100, None),  # windows within what is cached
)


class Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    cache_k: Tensor
    cache_v: Tensor


class Round(NamedTuple):
    """Of rows of one sequence; with tiles that are not in use, as a graph has them."""

    rows: Rows
    span: Span
    far: int  # pages

    def far_part(self, given: Inputs) -> FarPart:
        return attend_far(given.q, given.cache_k, given.cache_v, self.rows.table[0, : self.far])

    def alone(self, given: Inputs) -> Tensor:
        return attend(*given, self.rows)

    def with_cudnn(self, given: Inputs) -> Tensor:
        return attend(*given, self.rows, far=self.far_part(given))


def some_round(lengths: list[int], cached: int, start: int, size: int | None, device: Any) -> Round:
    group = HEADS // KV_HEADS
    rows, span = layout(lengths, cached, start, size, group, device)
    spare = most_tiles(sum(lengths), 16, group) - len(rows.tile_row)
    tile_row, tile_at = F.pad(rows.tile_row, (0, spare), value=-1), F.pad(rows.tile_at, (0, spare))
    table = F.pad(rows.table, (0, -rows.table.shape[1] % 16))
    rows = rows._replace(tile_row=tile_row, tile_at=tile_at, table=table)
    return Round(rows, span, min(cached, start) // CHUNK * CHUNK // PAGE)


def some_inputs(tokens: int, cached: int, device: Any) -> Inputs:
    """The queries, keys and values of a token lie side by side."""
    qkv = torch.randn(tokens, HEADS + 2 * KV_HEADS, DIM, device=device).to(DTYPE)
    q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
    pages = -(-cached // PAGE) + 2
    cache = torch.randn(2, pages * PAGE, KV_HEADS, DIM, device=device).to(DTYPE)
    return Inputs(q, k.contiguous(), v.contiguous(), *cache)


def check_far_part(device: Any) -> bool:
    """Each chunk by itself."""
    one = some_round([64] * 8, 5 * CHUNK, 5 * CHUNK, None, device)
    given = some_inputs(512, 5 * CHUNK, device)
    found = one.far_part(given)
    group, wrong = HEADS // KV_HEADS, []
    for chunk, pages in enumerate(one.rows.table[0, : one.far].view(-1, CHUNK // PAGE).long()):
        where = (pages[:, None] * PAGE + torch.arange(PAGE, device=device)).flatten()
        q, k, v = (x.float() for x in (given.q, given.cache_k[where], given.cache_v[where]))
        scores = torch.einsum("thd,shd->hts", q, k.repeat_interleave(group, 1)) * DIM**-0.5
        plain = reference(q[None], k[None], v[None], None)[0]
        wrong.append(
            (error(found.mixed[chunk], plain), error(found.lse[chunk], scores.logsumexp(-1)))
        )
    mixed, lse = (max(x) for x in zip(*wrong, strict=True))
    print(f"{mixed:10.2e}  cuDNN's chunks\n{lse:10.2e}  their log-sum-exp", flush=True)
    return mixed < MOST_WRONG and lse < 1e-4


def check(device: Any) -> bool:
    is_right = check_far_part(device)
    for lengths, cached, start, size in CHECKS:
        one = some_round(lengths, cached, start, size, device)
        given = some_inputs(sum(lengths), cached, device)
        plain = reference_batch(*[x.float() for x in given], [one.span])
        alone, both = error(one.alone(given), plain), error(one.with_cudnn(given), plain)
        rows = (
            " + ".join(map(str, lengths))
            if len(set(lengths)) > 1
            else f"{len(lengths)} x {lengths[0]}"
        )
        print(f"{both:10.2e}  {rows} behind {cached}; the kernel alone {alone:.2e}", flush=True)
        is_right &= both < MOST_WRONG and alone < MOST_WRONG
    return is_right


def compile_ahead(device: Any) -> None:
    began = time.perf_counter()
    with compilation.noted() as jobs:
        for count in (8, 4, 1):
            one = some_round([64] * count, CHUNK, CHUNK, None, device)
            given = some_inputs(64 * count, CHUNK, device)
            one.alone(given)
            one.with_cudnn(given)
    for kernel in compilation.compile_all(jobs, device):
        if kernel.error:
            print(f"{kernel.name}: {kernel.error}", flush=True)
    print(f"{len(jobs)} kernels in {time.perf_counter() - began:.1f} s", flush=True)


def call(work: Callable[[Inputs], object], layers: list[Inputs], index: int) -> object:
    return work(layers[index])


def times(name: str, device: Any) -> None:
    for count, prefix in CASES:
        one = some_round([64] * count, prefix, prefix, None, device)
        layers = [some_inputs(64 * count, prefix, device) for _ in range(LAYERS)]
        work = one.with_cudnn if name == "with cuDNN" else one.alone
        spent = microseconds(partial(call, work, layers), LAYERS)
        flops = 4 * 64 * count * (prefix + 64) * HEADS * DIM
        shape = f"{count:2} x 64 behind {prefix}"
        print(f"{name}: {shape} {spent:7.1f} µs {flops / spent / 1e6:4.0f} TFLOP/s", flush=True)


def time_steps(device: Any) -> None:
    count, prefix = CASES[0]
    one = some_round([64] * count, prefix, prefix, None, device)
    layers = [some_inputs(64 * count, prefix, device) for _ in range(LAYERS)]
    pages, part = one.rows.table[0, : one.far], one.far_part(layers[0])

    def gather(given: Inputs) -> object:
        caches = (x.view(-1, PAGE, KV_HEADS, DIM) for x in (given.cache_k, given.cache_v))
        return [x.index_select(0, pages) for x in caches]

    def near(given: Inputs) -> Tensor:
        return attend(*given, one.rows, far=part)

    steps: dict[str, Callable[[Inputs], object]] = {
        "pages made contiguous": gather,
        "pages made contiguous, cuDNN": one.far_part,
        "what is near, merge": near,
    }
    for name, step in steps.items():
        print(f"{name}: {microseconds(partial(call, step, layers), LAYERS):.1f} µs", flush=True)


def time_plan(device: Any) -> None:
    one = some_round([64] * 6, 6 * CHUNK, 6 * CHUNK, None, device)
    given, spent = some_inputs(384, 6 * CHUNK, device), []
    for _ in range(2):
        torch.cuda.synchronize()
        began = time.perf_counter()
        one.far_part(given)
        torch.cuda.synchronize()
        spent.append(1e3 * (time.perf_counter() - began))
    print(f"sizes that are new to cuDNN: {spent[0]:.1f} ms, again: {spent[1]:.1f} ms", flush=True)


@torch.inference_mode()
def main() -> None:
    torch.seed()
    device = torch.device("cuda")
    compile_ahead(device)
    if not check(device):
        sys.exit("wrong")
    # A capture that fails leaves torch unfit for others: what is sure to be captured comes first.
    for name in ("alone", "with cuDNN", "alone"):
        times(name, device)
    time_steps(device)
    time_plan(device)


if __name__ == "__main__":
    main()
