"""`lopa bench round` and `lopa bench decode`: speed, measured on the spot."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lopa.cli.model import load
from lopa.cli.options import (
    AdapterOption,
    DeviceOption,
    DtypeOption,
    Given,
    JsonOption,
    ModelOption,
    PresetOption,
    QuantizeOption,
    decode_config,
    with_decoding,
)
from lopa.cli.terminal import notes
from lopa.errors import ConfigError
from lopa.version import VERSION

if TYPE_CHECKING:
    from lopa.engine.llm import LLM

_WIDE = 160
bench = typer.Typer(no_args_is_help=True, help="Measure speed, on the spot.")


@bench.command("round")
def bench_round(
    model: ModelOption = None,
    branches: Annotated[str, typer.Option(help="Lookahead branches to try.")] = "0,1,3,7,14",
    window: Annotated[str, typer.Option(help="Tokens a row, multiples of 32.")] = "64,96",
    prefix: Annotated[int, typer.Option(min=1, help="Cached tokens before the window.")] = 768,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds to time for each line.")] = 24,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    quantize: QuantizeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Time whole rounds, decoder and host included, and compare with what the device allows.

    The floor is the larger of weight bytes over the measured copy bandwidth and operations over the
    measured matrix rate.
    """
    counts, windows = _numbers("branches", branches, 0), _numbers("window", window, 32)
    llm = load(model, None, device, dtype, quantize)
    from lopa.bench.ceilings import measure
    from lopa.bench.rounds import time_rounds
    from lopa.engine.quantize import KINDS

    ceilings = measure(llm.device, llm.dtype, KINDS[llm.quantize] if llm.quantize else None)
    console = notes()
    lines = []
    for tokens in windows:
        for count in counts:
            waiting = console.status(f"{count} branches, {tokens} tokens")
            with waiting if console.is_terminal else nullcontext():
                lines.append(
                    time_rounds(
                        llm, ceilings, branches=count, window=tokens, prefix=prefix, rounds=rounds
                    )
                )
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
    print(f"{_host_line(llm)}; copies {rates[0]:.0f} GB/s, products {rates[1]:.2f} TFLOP/s")
    print("times in ms, medians")
    print_table(
        ["k", "window", "tokens", "round", "forward", "host", "floor", "×floor", "GB/s", "TFLOP/s"],
        [
            (
                str(r.branches),
                str(r.window),
                str(r.tokens),
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
    decoding: Given,
    limit: Annotated[int, typer.Option(min=1, help="How many prompts.")] = 20,
    task: Annotated[str, typer.Option(help="Built-in task that the prompts come from.")] = "words",
    seed: Annotated[int, typer.Option(min=0, help="Which prompts; also for drawing.")] = 0,
    model: ModelOption = None,
    adapter: AdapterOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    quantize: QuantizeOption = None,
    preset: PresetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Decode prompts one by one: tokens per second, tokens per forward, latency."""
    config = decode_config(model, {**decoding, "seed": seed}, preset)
    from lopa.evaluation.evaluate import problems

    asked = problems(task, "eval", limit, seed)
    llm = load(model, adapter, device, dtype, quantize)
    from rich.progress import Progress

    from lopa.bench.decode import measure_decoding

    prompts: list[Any] = [problem.prompt for problem in asked]
    if llm.tokenizer is None:  # any tokens do for timing
        prompts = [list(range(1, 1 + min(64, llm.config.vocab_size // 2))) for _ in asked]
    console = notes()
    bar = Progress(console=console, transient=True)
    job = bar.add_task("decoding", total=limit)
    with bar if console.is_terminal else nullcontext():
        speed = measure_decoding(
            llm, prompts, config, lambda done, total: bar.update(job, completed=done, total=total)
        )
    found = asdict(speed)
    if as_json:
        print(json.dumps({"host": host(llm), **found, "settings": config.settings()}))
        return
    print(f"{_host_line(llm)}; {config.decoder}, one prompt at a time")
    shown = {n: f"{v:.2f}" if isinstance(v, float) else str(v) for n, v in found.items()}
    print_table(("", ""), [(n.replace("_", " "), v) for n, v in shown.items()])


def host(llm: LLM) -> dict[str, Any]:
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


def _host_line(llm: LLM) -> str:
    return ", ".join(f"{name} {value}" for name, value in host(llm).items())


def _numbers(name: str, text: str, least: int) -> list[int]:
    try:
        found = [int(word) for word in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < least:
        raise ConfigError(f"{name} must be whole numbers, at least {least}, separated by commas")
    return found


def print_table(heads: Iterable[str], rows: Iterable[tuple[str, ...]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, header_style="dim")
    for head in heads:
        table.add_column(head, justify="right")
    for row in rows:
        table.add_row(*row)
    # A file or a pipe has no width that columns would have to be squeezed into.
    width = None if sys.stdout.isatty() else _WIDE
    Console(highlight=False, markup=False, width=width).print(table)
