"""`lopa study`: experiments on lookahead decoding."""

from __future__ import annotations

import json
import shlex
import sys
from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from lopa.atomic_write import write_lines
from lopa.cli.bench import prompts_of, rerun_as_ranks
from lopa.cli.environment import environment
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
from lopa.cli.progress import Progress, start_torch
from lopa.cli.sweep import make_folder
from lopa.cli.terminal import print_note, print_table
from lopa.distributed.launch import is_main_rank
from lopa.errors import ConfigError

STUDIES = (
    "accept",
    "exact",
    "branches",
    "ablation",
    "order",
    "calibration",
    "auto",
    "speed",
    "load",
    "overhead",
    "sync",
)


@with_decoding("seed")
@with_parallel("tensor_parallel", "rank_timeout")
@with_model()
def study(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help=f"The study: {', '.join(STUDIES)}.")],
    model: ModelOptions,
    parallel: ParallelOptions,
    decoding: DecodeOptions,
    task: Annotated[str, typer.Option(help="Built-in task: words or functions.")] = "words",
    split: Annotated[str, typer.Option(help="Problems of the task: eval or held-out.")] = "eval",
    limit: Annotated[int, typer.Option(min=1, help="Number of problems.")] = 20,
    seed: Annotated[int, typer.Option(min=0, help="Seed of problems and sampling.")] = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="Problems decoded at once.")] = 1,
    workers: Annotated[
        int, typer.Option(min=1, help="Processes that decode, each with its own model.")
    ] = 1,
    report: Annotated[
        bool, typer.Option("--report", help="Decode nothing: report on the samples in the folder.")
    ] = False,
    at_once: Annotated[
        str, typer.Option(help="For load: requests at once, such as 1,8,32 (default: 1 to 128).")
    ] = "",
    rounds: Annotated[int, typer.Option(min=1, help="For sync: rounds to time.")] = 40,
    cost: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="For load, to simulate it: a round cost, or output of study speed or bench round; "
            "may be repeated.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Output folder (default: study-TASK)."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Run an experiment: its results as JSON, its plot as PNG and SVG.

    Samples are kept in the folder and not decoded again: an interrupted study resumes, and studies
    of the same problems share samples.
    """
    if name not in STUDIES:
        raise ConfigError(f"no study {name!r}: choose from {', '.join(STUDIES)}")
    if report:
        _report(name, out or Path(f"study-{task}"))
        return
    start_torch()
    from lopa.evaluation.evaluate import problems
    from lopa.evaluation.plots import require_plots
    from lopa.tasks import ROOM

    require_plots()
    length = {} if model.preset or "max_new_tokens" in decoding else {"max_new_tokens": ROOM}
    config = decode_config(model, {**length, **decoding, "seed": seed})
    if config.decoder != "lopa" or config.most_branches == 0:
        raise ConfigError("the studies are about lookahead: use the lopa decoder with branches")
    asked = problems(task, split, limit, seed)
    costs: dict[str, Any] = {}
    if cost:
        if name != "load":
            raise ConfigError("costs are for the study load: leave --cost out")
        from lopa.studies.recorded_cost import read_costs

        costs = {"costs": read_costs(cost)}
    loads = numbers("--at-once", at_once, 1) if at_once else ()
    if loads and name != "load":
        raise ConfigError("requests at once are for the study load: leave --at-once out")
    on_ranks = name == "sync"
    if on_ranks:
        rerun_as_ranks(context, parallel, always=True)
    elif parallel.branch_parallel is not None:
        raise ConfigError("ranks are for the study sync: leave --branch-parallel out")
    folder = make_folder(out or Path(f"study-{task}"))
    llm = load(model, parallel if on_ranks else None)
    experiment = import_module(f"lopa.studies.{name}")
    described: dict[str, Any] = {
        "task": task,
        "split": split,
        "problems": limit,
        "seed": seed,
        "host": environment(llm) | _matmul_precision(llm),
        "settings": config.settings(),
        **costs,
    }
    if on_ranks:
        from lopa.distributed.rank_llm import RankLLM

        assert isinstance(llm, RankLLM)

        def changed(**changes: Any) -> Any:
            return llm.decode_config(**config.changed(**changes).settings())

        with closing(llm), Progress(f"study {name}"):
            findings = experiment.run(llm, prompts_of(llm, asked), changed, rounds)
        if not is_main_rank():
            return
    else:
        from lopa.engine.llm import LLM
        from lopa.evaluation.sample import SampleFile
        from lopa.studies.study import Study
        from lopa.studies.worker_pool import Workers

        progress = Progress(f"study {name}")
        file = SampleFile(folder / "samples.jsonl", described)
        options = {"model": model.name, **model.llm_options}
        pool = Workers(workers, options) if workers > 1 else None
        usual = config.settings()
        assert isinstance(llm, LLM)
        todo = Study(
            llm, asked, usual, seed, file, batch_size, pool, progress.update, **costs, at_once=loads
        )
        try:
            with progress:
                findings = experiment.run(todo)
        finally:
            if pool is not None:
                pool.close()
    command = f"lopa {shlex.join(sys.argv[1:])}"
    _write_results(name, command, described, findings, folder, as_json)


def _report(name: str, folder: Path) -> None:
    """Report on the samples in a folder, on whatever machine they were made."""
    from lopa.evaluation.evaluate import problems
    from lopa.evaluation.sample import SampleFile, described_in
    from lopa.studies.study import Study

    path = folder / "samples.jsonl"
    run = described_in(path)
    asked = problems(run["task"], run["split"], run["problems"], run["seed"])
    costs = run.get("costs", {})
    todo = Study(None, asked, run["settings"], run["seed"], SampleFile(path, run), costs=costs)
    findings = import_module(f"lopa.studies.{name}").run(todo)
    options = (
        f"--task {run['task']} --split {run['split']} --limit {run['problems']} "
        f"--seed {run['seed']}"
    )
    command = f"lopa study {name} {options} --out {shlex.quote(str(folder))}"
    _write_results(name, command, run, findings, folder)


def _write_results(
    name: str,
    command: str,
    run: dict[str, Any],
    findings: Any,
    folder: Path,
    as_json: bool = False,
) -> None:
    experiment = import_module(f"lopa.studies.{name}")
    found = {"study": name, "command": command, **run, "findings": findings}
    write_lines(folder / f"{name}.json", [json.dumps(found, ensure_ascii=False, indent=1)])
    if as_json:
        print(json.dumps(found, ensure_ascii=False))
    else:
        print(f"{run['task']} ({run['split']}), {run['problems']} problems, seed {run['seed']}")
        print_table(*experiment.table(findings))
        print(experiment.reading(findings))
    _plot(experiment, findings, folder / name)


def _matmul_precision(llm: Any) -> dict[str, str]:
    """TF32, where matmuls in float32 use it."""
    import torch

    fast = llm.device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32
    return {"products": "TF32"} if fast and llm.dtype == torch.float32 else {}


def _plot(experiment: Any, findings: Any, path: Path) -> None:
    from lopa.evaluation.plots import require_plots, save

    try:
        require_plots()
    except ConfigError as error:
        print_note(f"results are in {path}.json; {error}")
        return
    plots = save(experiment.plot(findings), path)
    print_note(f"results and plots are in {path.parent}: {', '.join(p.name for p in plots)}")
