"""`lopa eval`: accuracy and tokens per forward on a built-in task or a public benchmark."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lopa.atomic_write import check_writable
from lopa.cli.environment import environment
from lopa.cli.model import load
from lopa.cli.options import (
    DecodeOptions,
    JsonOption,
    ModelOptions,
    decode_config,
    with_decoding,
    with_model,
)
from lopa.cli.progress import Progress, start_torch
from lopa.cli.sweep import run_sweep, says_how_to_go_on
from lopa.errors import ConfigError
from lopa.evaluation.protocol import PROTOCOLS
from lopa.evaluation.public import benchmark

if TYPE_CHECKING:
    from rich.table import Table

    from lopa.evaluation.benchmark import Benchmark

_LIMIT = 100  # problems of a built-in task: about a minute on two cores
_SPLIT = "eval"


@with_decoding("seed")
@with_model()
def evaluate(
    task: Annotated[str, typer.Argument(help=f"words, functions, {', '.join(PROTOCOLS)}.")],
    model: ModelOptions,
    decoding: DecodeOptions,
    more: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME=V,V]...", help="Other axes of --sweep.")
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            help=f"Number of problems (default: {_LIMIT} of a task, all of a benchmark).",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of a task's problems and of sampling.")] = 0,
    split: Annotated[
        str | None,
        typer.Option(
            help="Split of a task: eval (known structures, new numbers) or held-out (new "
            f"structures) (default: {_SPLIT}).",
            show_default=False,
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Rows of a benchmark as JSON, JSON Lines or Parquet (default: from the hub).",
        ),
    ] = None,
    shots: Annotated[
        int | None,
        typer.Option(help="Few-shot examples of a benchmark (default: as in the paper)."),
    ] = None,
    shots_data: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Rows of the few-shot examples (default: others of --data).",
        ),
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--no-chat",
            help="Apply the model's chat template to a benchmark (default: as in the paper).",
            show_default=False,
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Problems decoded at once.")] = 1,
    samples: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write every sample to FILE as JSON Lines; an interrupted run resumes from it.",
        ),
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=V,V",
            help="Evaluate all combinations of these values, with AUP and plots: branches=0,1,3,7.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Folder of --sweep; an interrupted run resumes from it (default: sweep-TASK).",
        ),
    ] = None,
    infill: Annotated[
        bool,
        typer.Option(
            "--infill",
            help="Hide a line of each reference answer of a task, and score what fills it.",
        ),
    ] = False,
    true_length: Annotated[
        bool,
        typer.Option(
            "--true-length",
            help="Give the gap of --infill the hidden line's number of tokens, in place of a "
            "search.",
        ),
    ] = False,
    unsafe_code: Annotated[
        bool,
        typer.Option(
            "--unsafe-code",
            help="Run generated code without isolation, where the machine allows none.",
        ),
    ] = False,
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
    if unsafe_code:
        from lopa.evaluation.judge import allow_unsafe_code

        allow_unsafe_code()
    if true_length and not infill:
        raise ConfigError("--true-length goes with --infill: give both, or neither")
    if task in PROTOCOLS:
        if infill:
            raise ConfigError("--infill goes with words and functions: leave it out")
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
        start_torch()
        from lopa.evaluation.evaluate import built_in, infilling
        from lopa.tasks import TASKS

        if task not in TASKS:
            known = ", ".join((*TASKS, *PROTOCOLS))
            raise ConfigError(f"no task {task!r}: choose from {known}")
        chosen = (task, split or _SPLIT, _LIMIT if limit is None else limit, seed)
        asked = infilling(*chosen, true_length=true_length) if infill else built_in(*chosen)
        strange = {"--data": data, "--shots": shots, "--shots-data": shots_data, "--chat": chat}
        for option, value in strange.items():
            if value is not None:
                raise ConfigError(f"{option} goes with a benchmark: {', '.join(PROTOCOLS)}")
    if unsafe_code:
        facts = {**asked.facts, "unsafe_code": True}
        asked = replace(asked, facts=facts, title=f"{asked.title}, unsafe code")
    given = {**asked.options(decoding, model.preset), "seed": seed}
    if sweep:
        run_sweep(
            [*sweep, *(more or [])],
            lambda o: decode_config(model, {**given, **o}),
            lambda: load(model),
            benchmark=asked,
            batch_size=batch_size,
            out=out,
            as_json=as_json,
        )
        return
    config = decode_config(model, given)
    from lopa.evaluation.evaluate import answer, report
    from lopa.evaluation.sample import SampleFile, Samples

    llm = load(model)
    run = {**asked.described(), "settings": config.settings(), "host": environment(llm)}
    kept = Samples() if samples is None else SampleFile(samples, run)
    progress = Progress(asked.title, "answers")
    total = len(asked.exercises)
    with says_how_to_go_on(samples, lambda: len(kept.of("", total)), total), progress:
        answer(
            llm,
            asked,
            config,
            kept,
            setting="",
            batch_size=batch_size,
            tick=lambda: progress.update(len(kept.of("", total)), total),
        )
    found = report(asked, config, kept.of("", total), batch_size)
    if as_json:
        print(json.dumps({**found, "host": environment(llm)}, ensure_ascii=False))
        return
    from rich.console import Console

    Console(highlight=False, markup=False).print(_table(asked, found))


def _has_template(model: ModelOptions, chat: bool | None) -> bool:
    """Whether to apply the chat template; ConfigError when there is none to apply."""
    from lopa.models.checkpoint import DUMMY
    from lopa.models.files import resolve
    from lopa.models.tokenizer import Tokenizer

    is_dummy = model.name.startswith(DUMMY)
    tokenizer = None if is_dummy else Tokenizer.from_folder(resolve(model.name))
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
        "TPF": f"{found['tpf']:.2f}  (up to EOS, over all rounds)",
        "TPF (paper)": f"{found['tpf_paper']:.2f}  (all filled tokens, over rounds + 1)",
        "rounds": f"{found['rounds'] / found['problems']:.1f} per problem",
        "tokens/s": f"{found['tokens_per_second']:.1f} mean, "
        f"{found['tokens_per_second_max']:.1f} max, "
        f"{found['tokens_per_second_top10']:.1f} top 10, {after:.1f} without the first round",
        "tokens/s (paper)": f"{found['tokens_per_second_paper']:.1f}  "
        "(all filled tokens, without the first round)",
        "throughput": f"{found['tokens_per_second_together']:.1f} tokens/s  "
        f"({found['batch_size']} at once)",
        "latency": f"{found['latency_mean']:.2f} s mean, {found['latency_p50']:.2f} p50, "
        f"{found['latency_p95']:.2f} p95; first round {first:.3f} s of it",
        "unfinished": str(found["unfinished"]),
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table
