"""`lopa bench`: speed, measured on the spot, and what more devices would make of it."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lopa.cli.model import Devices, load
from lopa.cli.options import (
    AdapterOption,
    BranchParallelOption,
    DeviceOption,
    DtypeOption,
    Given,
    JsonOption,
    ModelOption,
    PresetOption,
    QuantizeOption,
    RankTimeoutOption,
    TensorParallelOption,
    decode_config,
    with_decoding,
)
from lopa.cli.terminal import notes, print_table
from lopa.distributed.launch import PARENT, launched, run_ranks
from lopa.errors import ConfigError
from lopa.version import VERSION

if TYPE_CHECKING:
    from lopa.engine.llm import BaseLLM
    from lopa.tasks.problem import Problem

bench = typer.Typer(no_args_is_help=True, help="Measure speed, on the spot.")


@bench.command("round")
def bench_round(
    context: typer.Context,
    model: ModelOption = None,
    branches: Annotated[str, typer.Option(help="Lookahead branches to try.")] = "0,1,3,7,14",
    window: Annotated[str, typer.Option(help="Tokens a row, multiples of 32.")] = "64,96",
    prefix: Annotated[int, typer.Option(min=1, help="Cached tokens before the window.")] = 768,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds to time for each line and pass.")] = 24,
    passes: Annotated[int, typer.Option(min=1, help="Times to go over all lines.")] = 1,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    quantize: QuantizeOption = None,
    branch_parallel: BranchParallelOption = None,
    tensor_parallel: TensorParallelOption = None,
    rank_timeout: RankTimeoutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Time whole rounds, decoder and host included, and compare with what the device allows.

    The floor is the larger of weight bytes over the measured copy bandwidth and operations over the
    measured matrix rate.
    """
    counts, windows = _numbers("branches", branches, 0), _numbers("window", window, 32)
    devices = Devices(branch_parallel, tensor_parallel, rank_timeout)
    be_ranks(context, devices)
    llm = load(model, None, device, dtype, quantize, devices)
    from lopa.bench.ceilings import measure
    from lopa.bench.gc_frozen import frozen
    from lopa.bench.rounds import SteadyRounds
    from lopa.distributed.rank_llm import RankLLM
    from lopa.engine.llm import LLM
    from lopa.kernels.quantize import KINDS

    assert isinstance(llm, LLM | RankLLM)  # `be_ranks` has seen to it
    ceilings = measure(llm.device, llm.dtype, KINDS[llm.quantize] if llm.quantize else None)
    console = notes()
    shapes = [
        SteadyRounds(llm, branches=count, window=tokens, prefix=prefix)
        for tokens in windows
        for count in counts
    ]
    with frozen():
        for shape in shapes * passes:
            waiting = console.status(f"{shape.branches} branches, {shape.window} tokens")
            with waiting if console.is_terminal else nullcontext():
                shape.time(rounds)
    lines = [shape.result(ceilings) for shape in shapes]
    if as_json:
        found = {
            "host": host(llm),
            "bytes_per_second": ceilings.bytes_per_second,
            "flops_per_second": ceilings.flops_per_second,
            "quantised_flops_per_second": ceilings.quantised_flops_per_second,
            "rounds": [asdict(line) for line in lines],
        }
        print(json.dumps(found))
        return
    rates = ceilings.bytes_per_second / 1e9, ceilings.flops_per_second / 1e12
    print(f"{host_line(llm)}; copies {rates[0]:.0f} GB/s, products {rates[1]:.2f} TFLOP/s")
    print("times in ms, medians")
    heads = ["k", "window", "tokens", "masks", "round", "forward", "host", "floor", "×floor"]
    print_table(
        [*heads, "GB/s", "TFLOP/s"],
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
            )
            for r in lines
        ],
    )


@bench.command("decode")
@with_decoding("seed")
def bench_decode(
    context: typer.Context,
    decoding: Given,
    limit: Annotated[int, typer.Option(min=1, help="How many prompts.")] = 20,
    together: Annotated[
        int | None, typer.Option(min=2, help="Decode them all again, so many at once.")
    ] = None,
    task: Annotated[str, typer.Option(help="Built-in task that the prompts come from.")] = "words",
    seed: Annotated[int, typer.Option(min=0, help="Which prompts; also for drawing.")] = 0,
    model: ModelOption = None,
    adapter: AdapterOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    quantize: QuantizeOption = None,
    preset: PresetOption = None,
    branch_parallel: BranchParallelOption = None,
    tensor_parallel: TensorParallelOption = None,
    rank_timeout: RankTimeoutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Decode prompts one by one: tokens per second, tokens per forward, latency.

    With --together N then N at once, and how many times the tokens per second that gives.
    """
    config = decode_config(model, {**decoding, "seed": seed}, preset)
    from lopa.evaluation.evaluate import problems

    asked = problems(task, "eval", limit, seed)
    devices = Devices(branch_parallel, tensor_parallel, rank_timeout)
    be_ranks(context, devices)
    llm = load(model, adapter, device, dtype, quantize, devices)
    from rich.progress import Progress

    from lopa.bench.decode import measure_decoding, measure_together
    from lopa.bench.gc_frozen import frozen

    prompts = prompts_of(llm, asked)
    console = notes()
    bar = Progress(console=console, transient=True)
    job = bar.add_task("decoding", total=limit)
    with frozen(), bar if console.is_terminal else nullcontext():
        speed = measure_decoding(
            llm, prompts, config, lambda done, total: bar.update(job, completed=done, total=total)
        )
    found = asdict(speed)
    many = None
    if together is not None:
        if console.is_terminal:
            console.print(f"{together} at once …")
        with frozen():
            many = asdict(measure_together(llm, prompts, config, together, speed))
    if as_json:
        line = {"host": host(llm), **found, "settings": config.settings()}
        print(json.dumps(line | ({"together": many} if many else {})))
        return
    print(f"{host_line(llm)}; {config.decoder}, one prompt at a time")
    _print_figures(found)
    if many is not None:
        print(f"{together} at once")
        _print_figures(many)


def be_ranks(context: typer.Context, devices: Devices, always: bool = False) -> None:
    """Run this command as ranks instead, where several are asked for and nobody made them.

    `always`: also for one, so that it runs under the same conditions as several.
    """
    if launched() is None and (devices.ranks > 1 or (always and PARENT not in os.environ)):
        raise typer.Exit(run_ranks(devices.ranks, context.obj))


def _print_figures(found: dict[str, Any]) -> None:
    shown = {n: f"{v:.2f}" if isinstance(v, float) else str(v) for n, v in found.items()}
    print_table(("", ""), [(n.replace("_", " "), v) for n, v in shown.items()])


def prompts_of(llm: BaseLLM, asked: Sequence[Problem]) -> list[Any]:
    if llm.tokenizer is None:  # any tokens do for timing
        return [list(range(1, 1 + min(64, llm.config.vocab_size // 2))) for _ in asked]
    return [problem.prompt for problem in asked]


def host(llm: BaseLLM) -> dict[str, Any]:
    """What a figure must be read with."""
    import torch

    cuda = llm.device.type == "cuda"
    return {
        "model": llm.name,
        "device": torch.cuda.get_device_name(llm.device) if cuda else platform.machine(),
        "dtype": str(llm.dtype).removeprefix("torch."),
        "quantize": llm.quantize,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "lopa": VERSION,
    }


def host_line(llm: BaseLLM) -> str:
    return ", ".join(f"{name} {value}" for name, value in host(llm).items())


def _numbers(name: str, text: str, least: int) -> list[int]:
    try:
        found = [int(word) for word in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < least:
        raise ConfigError(f"{name} must be whole numbers, at least {least}, separated by commas")
    return found
