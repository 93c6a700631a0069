"""`lopa bench`: speed on this machine."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lopa.atomic_write import check_writable
from lopa.cli.environment import environment, environment_line
from lopa.cli.model import load
from lopa.cli.options import (
    DecodeOptions,
    JsonOption,
    ModelOptions,
    ParallelOptions,
    decode_config,
    numbers,
    with_decoding,
    with_model,
    with_parallel,
)
from lopa.cli.progress import Progress
from lopa.cli.terminal import print_table
from lopa.config import AUTO_BRANCHES
from lopa.distributed.launch import PARENT, launch_info, run_ranks

if TYPE_CHECKING:
    from lopa.engine.base_llm import BaseLLM
    from lopa.tasks.problem import Problem

bench = typer.Typer(no_args_is_help=True, help="Measure speed on this machine.")


@bench.command("round")
@with_parallel()
@with_model("adapter", "preset")
def bench_round(
    context: typer.Context,
    model: ModelOptions,
    parallel: ParallelOptions,
    branches: Annotated[str, typer.Option(help="Lookahead branches to time.")] = "0,1,3,7,14",
    window: Annotated[str, typer.Option(help="Tokens per row, multiples of 32.")] = "64,96",
    prefix: Annotated[int, typer.Option(min=1, help="Cached tokens before the window.")] = 768,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds to time per line and pass.")] = 24,
    passes: Annotated[int, typer.Option(min=1, help="Passes over all lines.")] = 1,
    as_json: JsonOption = False,
) -> None:
    """Time whole rounds, decoder and host included, against the floor of the device.

    The floor is the larger of bytes over the measured copy bandwidth and FLOPs over the measured
    matmul rate: weights, of experts those that are touched, attention, and cached keys and values.
    """
    counts, windows = numbers("branches", branches, 0), numbers("window", window, 32)
    rerun_as_ranks(context, parallel)
    llm = load(model, parallel)
    from lopa.bench.ceilings import measure
    from lopa.bench.gc_frozen import frozen
    from lopa.bench.rounds import SteadyRounds
    from lopa.distributed.rank_llm import RankLLM
    from lopa.engine.llm import LLM
    from lopa.kernels.quantize import KINDS

    assert isinstance(llm, LLM | RankLLM)  # `be_ranks` has seen to it
    with Progress("measuring copies and matmuls"):
        ceilings = measure(llm.device, llm.dtype, KINDS[llm.quantize] if llm.quantize else None)
    shapes = [
        SteadyRounds(llm, branches=count, window=tokens, prefix=prefix)
        for tokens in windows
        for count in counts
    ]
    with frozen(), Progress("timing rounds", "shapes") as progress:
        for done, shape in enumerate(shapes * passes):
            progress.update(done, len(shapes) * passes)
            shape.time(rounds)
    lines = [shape.result(ceilings) for shape in shapes]
    if as_json:
        found = {
            "host": environment(llm),
            "bytes_per_second": ceilings.bytes_per_second,
            "flops_per_second": ceilings.flops_per_second,
            "quantised_flops_per_second": ceilings.quantised_flops_per_second,
            "rounds": [asdict(line) for line in lines],
        }
        print(json.dumps(found))
        return
    rates = ceilings.bytes_per_second / 1e9, ceilings.flops_per_second / 1e12
    print(f"{environment_line(llm)}; copies {rates[0]:.0f} GB/s, matmul {rates[1]:.2f} TFLOP/s")
    print("median times in ms")
    heads = ["k", "window", "tokens", "masks", "round", "forward", "host", "floor", "×floor"]
    experts = ["experts"] if llm.config.mixture else []
    print_table(
        [*heads, "GB/s", "TFLOP/s", *experts],
        [
            (
                str(r.branches),
                str(r.window),
                str(r.tokens),
                f"{r.masks:.0f}",
                f"{r.round_ms:.2f}",
                f"{r.forward_ms:.2f}",
                f"{r.host_ms:.2f}",
                f"{r.floor_ms:.2f}",
                f"{r.ratio:.2f}",
                f"{r.gigabytes_per_second:.1f}",
                f"{r.teraflops:.2f}",
                *(f"{r.touched_experts or math.nan:.0f}" for _ in experts),
            )
            for r in lines
        ],
    )


@bench.command("cost")
@with_model("adapter", "preset", "round_cost")
def bench_cost(
    model: ModelOptions,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Where to keep it.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure what rounds cost, which `--branches auto` goes by; `--round-cost FILE` gives it.

    Points are (tokens of a round, ms on the device). The host adds its part of every round and of
    every session, by its branches. It is also kept in the cache folder, in place of what was
    measured before.
    """
    if out is not None:
        check_writable(out, "the cost")
    llm = load(model)
    from lopa.engine.llm import LLM

    assert isinstance(llm, LLM)
    with Progress("measuring what rounds cost"):
        cost = llm.measure_round_cost()
    about = environment(llm)
    if out is not None:
        cost.write(out, **about)
    if as_json:
        print(json.dumps({**about, **cost.settings()}))
        return
    print(f"{environment_line(llm)}")
    print_table(("tokens", "ms"), [(str(t), f"{1e3 * s:.2f}") for t, s in cost.points])
    every, more = 1e3 * cost.every_round, 1e3 * cost.mixed_round
    print(f"\nof every round on the host, ms: {every:.2f}, and {more:.2f} where sessions differ")
    print("\nof a session on the host, ms:")
    parts = (("between forwards", cost.host), ("meanwhile", cost.records))
    rows = [(name, *(f"{1e3 * seconds:.2f}" for seconds in part)) for name, part in parts if part]
    print_table(("", *(f"k = {k}" for k in AUTO_BRANCHES)), rows)


@bench.command("decode")
@with_decoding("seed")
@with_parallel()
@with_model()
def bench_decode(
    context: typer.Context,
    model: ModelOptions,
    parallel: ParallelOptions,
    decoding: DecodeOptions,
    limit: Annotated[int, typer.Option(min=1, help="Number of prompts.")] = 20,
    together: Annotated[
        int | None, typer.Option(min=2, help="Decode them again, this many at once.")
    ] = None,
    task: Annotated[str, typer.Option(help="Built-in task of the prompts.")] = "words",
    seed: Annotated[int, typer.Option(min=0, help="Seed of prompts and sampling.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Decode prompts one by one: tokens per second, tokens per forward, latency.

    With --together N, then N at once, and the speedup.
    """
    config = decode_config(model, {**decoding, "seed": seed})
    from lopa.evaluation.evaluate import problems

    asked = problems(task, "eval", limit, seed)
    rerun_as_ranks(context, parallel)
    llm = load(model, parallel)
    from lopa.bench.decode import measure_decoding, measure_together
    from lopa.bench.gc_frozen import frozen

    prompts = prompts_of(llm, asked)
    with frozen(), Progress("decoding", "prompts") as progress:
        speed = measure_decoding(llm, prompts, config, progress.update)
    found = asdict(speed)
    many = None
    if together is not None:
        with frozen(), Progress(f"decoding {together} at once"):
            many = asdict(measure_together(llm, prompts, config, together, speed))
    if as_json:
        line = {"host": environment(llm), **found, "settings": config.settings()}
        print(json.dumps(line | ({"together": many} if many else {})))
        return
    print(f"{environment_line(llm)}; {config.decoder}, one prompt at a time")
    _print_figures(found)
    if many is not None:
        print(f"{together} at once")
        _print_figures(many)


def rerun_as_ranks(context: typer.Context, parallel: ParallelOptions, always: bool = False) -> None:
    """Run this command as ranks instead, where several are asked for and no launcher made them.

    `always`: also for one rank, so that it runs under the same conditions as several.
    """
    if launch_info() is None and (parallel.ranks > 1 or (always and PARENT not in os.environ)):
        raise typer.Exit(run_ranks(parallel.ranks, context.obj))


def _print_figures(found: dict[str, Any]) -> None:
    shown = {n: f"{v:.2f}" if isinstance(v, float) else str(v) for n, v in found.items()}
    print_table(("", ""), [(n.replace("_", " "), v) for n, v in shown.items()])


def prompts_of(llm: BaseLLM, asked: Sequence[Problem]) -> list[Any]:
    if llm.tokenizer is None:  # any tokens do for timing
        return [list(range(1, 1 + min(64, llm.config.vocab_size // 2))) for _ in asked]
    return [problem.prompt for problem in asked]
