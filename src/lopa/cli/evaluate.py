"""`lopa eval`: accuracy and tokens per forward on a built-in task."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
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
from lopa.cli.sweep import run_sweep
from lopa.cli.terminal import notes
from lopa.errors import ConfigError
from lopa.writing import check_writable, write_lines

if TYPE_CHECKING:
    from rich.table import Table

    from lopa.evaluation.evaluate import Report

_ROOM = 160  # new tokens: what an answer to a built-in task may need


@with_decoding("seed")
def evaluate(
    task: Annotated[str, typer.Argument(help="words or functions.")],
    decoding: Given,
    more: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME=V,V]...", help="More for --sweep.")
    ] = None,
    limit: Annotated[int, typer.Option(help="How many problems.")] = 500,
    seed: Annotated[int, typer.Option(help="Which problems; also for drawing.")] = 0,
    split: Annotated[
        str,
        typer.Option(help="eval: structures of training, new numbers; held-out: new structures."),
    ] = "eval",
    batch_size: Annotated[int, typer.Option(help="Problems decoded at once.")] = 1,
    samples: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write every answer as JSON Lines.")
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=V,V",
            help="Every combination of these values, with AUP and pictures: branches=0,1,3,7.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="For --sweep: where its files go; a run that was stopped goes on there "
            "(default: sweep-TASK).",
        ),
    ] = None,
    model: ModelOption = None,
    adapter: AdapterOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    quantize: QuantizeOption = None,
    preset: PresetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Score a decoder on a built-in task: accuracy, tokens per forward, tokens per second."""
    room = {} if preset or "max_new_tokens" in decoding else {"max_new_tokens": _ROOM}
    if sweep:
        if samples is not None:
            raise ConfigError("a sweep keeps its samples in its folder: leave --samples out")
        run_sweep(
            [*sweep, *(more or [])],
            lambda o: decode_config(model, {**room, **decoding, "seed": seed, **o}, preset),
            lambda: load(model, adapter, device, dtype, quantize),
            task=task,
            split=split,
            limit=limit,
            seed=seed,
            batch_size=_checked(batch_size),
            out=out,
            as_json=as_json,
        )
        return
    if more or out is not None:
        raise ConfigError(f"{(more or ['--out'])[0]} goes with --sweep: give both, or neither")
    config = decode_config(model, {**room, **decoding, "seed": seed}, preset)
    from lopa.evaluation.evaluate import evaluate as run
    from lopa.evaluation.evaluate import problems

    _checked(batch_size)
    if samples is not None:
        check_writable(samples, "samples")
    problems(task, split, 1, seed)  # a wrong name is found before the model is loaded
    llm = load(model, adapter, device, dtype, quantize)
    console = notes()
    from rich.progress import Progress

    bar = Progress(console=console, transient=True)
    job = bar.add_task(f"{task} ({split})", total=limit)
    with bar if console.is_terminal else nullcontext():
        report, found = run(
            llm,
            task,
            config,
            split=split,
            limit=limit,
            seed=seed,
            batch_size=batch_size,
            progress=lambda done, total: bar.update(job, completed=done, total=total),
        )
    if samples is not None:
        rows = [
            {"prompt": p.prompt, "text": o.text, "correct": right, **_figures(o)}
            for p, o, right in found
        ]
        write_lines(samples, (json.dumps(row, ensure_ascii=False) for row in rows))
    if as_json:
        print(json.dumps(report.summary(), ensure_ascii=False))
        return
    from rich.console import Console

    Console(highlight=False, markup=False).print(_table(report))


def _checked(batch_size: int) -> int:
    if batch_size < 1:
        raise ConfigError(f"batch-size must be at least 1: got {batch_size}")
    return batch_size


def _figures(output: Any) -> dict[str, Any]:
    return {"rounds": output.rounds, "tokens": output.tokens, "finish": output.finish}


def _table(report: Report) -> Table:
    from rich import box
    from rich.table import Table

    low, high = report.interval
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, header_style="dim", show_header=False)
    rows = {
        "task": f"{report.task}, {report.split}, {report.problems} problems, seed {report.seed}",
        "decoder": report.decoder,
        "accuracy": f"{report.accuracy:.1%}  (95 % interval {low:.1%} … {high:.1%})",
        "TPF": f"{report.tpf:.2f}  (to the end of text, over all rounds)",
        "rounds": f"{report.rounds / report.problems:.1f} a problem",
        "tokens/s": f"{report.tokens / report.seconds:.1f}  ({report.batch_size} at once)",
        "unfinished": str(report.unfinished),
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table
