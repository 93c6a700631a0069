"""`lopa eval`: accuracy and tokens per forward on a built-in task or a public benchmark."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lopa.atomic_write import check_writable
from lopa.cli.bench import host
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
    default_model,
    with_decoding,
)
from lopa.cli.sweep import progress_bar, run_sweep
from lopa.errors import ConfigError
from lopa.evaluation.protocol import PROTOCOLS
from lopa.evaluation.public import benchmark

if TYPE_CHECKING:
    from rich.table import Table

    from lopa.evaluation.benchmark import Benchmark

_LIMIT = 500  # problems of a built-in task, of which there is no end
_SPLIT = "eval"


@with_decoding("seed")
def evaluate(
    task: Annotated[str, typer.Argument(help=f"words, functions, {', '.join(PROTOCOLS)}.")],
    decoding: Given,
    more: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME=V,V]...", help="More for --sweep.")
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            help=f"How many problems (default: {_LIMIT} of a task, all of a benchmark).",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Which problems of a task; also for drawing.")] = 0,
    split: Annotated[
        str | None,
        typer.Option(
            help="Of a task: eval (structures of training, new numbers) or held-out (new "
            f"structures) (default: {_SPLIT}).",
            show_default=False,
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Rows of a benchmark as JSON, JSON Lines or Parquet (default: those on the hub).",
        ),
    ] = None,
    shots: Annotated[
        int | None,
        typer.Option(help="Examples before a benchmark's question (default: as the paper's)."),
    ] = None,
    shots_data: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Rows that the examples are drawn from (default: others of --data).",
        ),
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--no-chat",
            help="Ask a benchmark through the model's chat template (default: as the paper did, "
            "if there is one).",
            show_default=False,
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Problems decoded at once.")] = 1,
    samples: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Every answer as JSON Lines; a run that was stopped goes on there.",
        ),
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
    """Score a decoder on a task or benchmark: accuracy, tokens per forward, tokens per second."""
    if batch_size < 1:
        raise ConfigError(f"batch-size must be at least 1: got {batch_size}")
    if sweep and samples is not None:
        raise ConfigError("a sweep keeps its samples in its folder: leave --samples out")
    if not sweep and (more or out is not None):
        raise ConfigError(f"{(more or ['--out'])[0]} goes with --sweep: give both, or neither")
    if samples is not None:
        check_writable(samples, "samples")
    if task in PROTOCOLS:
        if split is not None:
            raise ConfigError(f"{task} has no --split: leave it out")
        asked = benchmark(
            task,
            chat=_has_template(model, chat) if PROTOCOLS[task].chat or chat else False,
            data=data,
            shots=shots,
            shots_data=shots_data,
            limit=limit,
        )
    else:
        from lopa.evaluation.evaluate import built_in
        from lopa.tasks import TASKS

        if task not in TASKS:
            known = ", ".join((*TASKS, *PROTOCOLS))
            raise ConfigError(f"no task {task!r}: choose from {known}")
        asked = built_in(task, split or _SPLIT, _LIMIT if limit is None else limit, seed)
        strange = {"--data": data, "--shots": shots, "--shots-data": shots_data, "--chat": chat}
        for option, value in strange.items():
            if value is not None:
                raise ConfigError(f"{option} goes with a benchmark: {', '.join(PROTOCOLS)}")
    given = {**asked.options(decoding, preset), "seed": seed}
    if sweep:
        run_sweep(
            [*sweep, *(more or [])],
            lambda o: decode_config(model, {**given, **o}, preset),
            lambda: load(model, adapter, device, dtype, quantize),
            benchmark=asked,
            batch_size=batch_size,
            out=out,
            as_json=as_json,
        )
        return
    config = decode_config(model, given, preset)
    from lopa.evaluation.evaluate import answer, report
    from lopa.evaluation.sample import SampleFile, Samples

    llm = load(model, adapter, device, dtype, quantize)
    run = {**asked.described(), "settings": config.settings(), "host": host(llm)}
    kept = Samples() if samples is None else SampleFile(samples, run)
    progress, bar = progress_bar(asked.title)
    total = len(asked.exercises)
    with bar:
        answer(
            llm,
            asked,
            config,
            kept,
            setting="",
            batch_size=batch_size,
            tick=lambda: progress(len(kept.samples), total),
        )
    found = report(asked, config, kept.of(""), batch_size)
    if as_json:
        print(json.dumps({**found, "host": host(llm)}, ensure_ascii=False))
        return
    from rich.console import Console

    Console(highlight=False, markup=False).print(_table(asked, found))


def _has_template(model: str | None, chat: bool | None) -> bool:
    """Whether to ask by chat, where the model can be asked so."""
    from lopa.models.checkpoint import DUMMY
    from lopa.models.files import resolve
    from lopa.models.tokenizer import Tokenizer

    name = model or default_model()
    tokenizer = None if name.startswith(DUMMY) else Tokenizer.from_folder(resolve(name))
    has = tokenizer is not None and tokenizer.chat_template is not None
    if chat and not has:
        raise ConfigError("this model has no chat template: leave --chat out")
    return has if chat is None else chat


def _table(asked: Benchmark, found: dict[str, Any]) -> Table:
    from rich import box
    from rich.table import Table

    low, high = found["interval"]
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, header_style="dim", show_header=False)
    first, after = found["first_round_seconds"], found["tokens_per_second_after_first"]
    rows = {
        "task": asked.title,
        "decoder": found["decoder"],
        "accuracy": f"{found['accuracy']:.1%}  (95 % interval {low:.1%} … {high:.1%})",
        **{f"  {name}": f"{share:.1%}" for name, share in found["scores"].items()},
        "TPF": f"{found['tpf']:.2f}  (to the end of text, over all rounds)",
        "TPF (paper)": f"{found['tpf_paper']:.2f}  (all that was filled, over rounds + 1)",
        "rounds": f"{found['rounds'] / found['problems']:.1f} a problem",
        "tokens/s": f"{found['tokens_per_second']:.1f} mean, "
        f"{found['tokens_per_second_max']:.1f} max, "
        f"{found['tokens_per_second_top10']:.1f} top 10, {after:.1f} without the first round",
        "tokens/s (paper)": f"{found['tokens_per_second_paper']:.1f}  "
        "(all that was filled, without the first round)",
        "throughput": f"{found['tokens_per_second_together']:.1f} tokens/s  "
        f"({found['batch_size']} at once)",
        "latency": f"{found['latency_mean']:.2f} s mean, {found['latency_p50']:.2f} p50, "
        f"{found['latency_p95']:.2f} p95; first round {first:.3f} s of it",
        "unfinished": str(found["unfinished"]),
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table
