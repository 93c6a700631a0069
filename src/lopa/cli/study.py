"""`lopa study`: the experiments around lookahead decoding, one command each."""

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
from lopa.cli.bench import be_ranks, host, prompts_of
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
    decode_config,
    default_model,
    with_decoding,
)
from lopa.cli.sweep import make_folder, progress_bar
from lopa.cli.terminal import note, print_table
from lopa.distributed.launch import speaks
from lopa.errors import ConfigError

STUDIES = (
    "branches",
    "ablation",
    "order",
    "calibration",
    "auto",
    "simulation",
    "speed",
    "overhead",
    "sync",
)


@with_decoding("seed")
def study(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help=f"Which one: {', '.join(STUDIES)}.")],
    decoding: Given,
    task: Annotated[str, typer.Option(help="words or functions.")] = "words",
    limit: Annotated[int, typer.Option(min=1, help="How many problems.")] = 20,
    seed: Annotated[int, typer.Option(min=0, help="Which problems; also for chance.")] = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="Answers decoded at once.")] = 1,
    workers: Annotated[
        int, typer.Option(min=1, help="Processes that decode, each with a model of its own.")
    ] = 1,
    report: Annotated[
        bool, typer.Option("--report", help="Decode nothing: report what the folder has.")
    ] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds that sync times.")] = 40,
    cost: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="For simulation: what rounds cost (study speed, bench round); may be repeated.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Where its files go (default: study-TASK)."),
    ] = None,
    model: ModelOption = None,
    adapter: AdapterOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    quantize: QuantizeOption = None,
    preset: PresetOption = None,
    branch_parallel: BranchParallelOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run an experiment: its figures as JSON, its picture as PNG and SVG.

    Answers are kept in the folder, and what is there is not decoded again: an interrupted study
    goes on, and studies of the same problems share what they have in common.
    """
    if name not in STUDIES:
        raise ConfigError(f"no study {name!r}: choose from {', '.join(STUDIES)}")
    if report:
        _report(name, out or Path(f"study-{task}"))
        return
    from lopa.evaluation.evaluate import problems
    from lopa.tasks import ROOM

    room = {} if preset or "max_new_tokens" in decoding else {"max_new_tokens": ROOM}
    config = decode_config(model, {**room, **decoding, "seed": seed}, preset)
    if config.decoder != "lopa" or config.most_branches == 0:
        raise ConfigError("the studies are about lookahead: use the lopa decoder with branches")
    asked = problems(task, "eval", limit, seed)
    costs: dict[str, Any] = {}
    if name == "simulation":
        from lopa.studies.simulation import read_costs

        costs = {"costs": read_costs(cost or [])}
    elif cost:
        raise ConfigError("costs are for the study simulation: leave --cost out")
    devices = Devices(branch_parallel) if name == "sync" else None
    if devices is not None:
        be_ranks(context, devices, always=True)
    elif branch_parallel is not None:
        raise ConfigError("ranks are for the study sync: leave --branch-parallel out")
    folder = make_folder(out or Path(f"study-{task}"))
    llm = load(model, adapter, device, dtype, quantize, devices)
    experiment = import_module(f"lopa.studies.{name}")
    described: dict[str, Any] = {
        "task": task,
        "problems": limit,
        "seed": seed,
        "host": host(llm) | _products(llm),
        "settings": config.settings(),
        **costs,
    }
    if devices is not None:
        from lopa.distributed.rank_llm import RankLLM

        assert isinstance(llm, RankLLM)

        def changed(**changes: Any) -> Any:
            return llm.decode_config(**{**config.settings(), **changes})

        with closing(llm):
            findings = experiment.run(llm, prompts_of(llm, asked), changed, rounds)
        if not speaks():
            return
    else:
        from lopa.engine.llm import LLM
        from lopa.evaluation.sample import SampleFile
        from lopa.studies.study import Study
        from lopa.studies.worker_pool import Workers

        progress, bar = progress_bar(f"study {name}")
        file = SampleFile(folder / "samples.jsonl", described)
        options = {"adapter": adapter, "device": device, "dtype": dtype, "quantize": quantize}
        given = {key: value for key, value in options.items() if value is not None}
        pool = (
            Workers(workers, {"model": model or default_model(), **given}) if workers > 1 else None
        )
        usual = config.settings()
        assert isinstance(llm, LLM)
        todo = Study(llm, asked, usual, seed, file, batch_size, pool, progress, **costs)
        try:
            with bar:
                findings = experiment.run(todo)
        finally:
            if pool is not None:
                pool.close()
    command = f"lopa {shlex.join(sys.argv[1:])}"
    _tell(name, command, described, findings, folder, as_json)


def _report(name: str, folder: Path) -> None:
    """What the samples on file say, on whatever machine they were made."""
    from lopa.evaluation.evaluate import problems
    from lopa.evaluation.sample import SampleFile, described_in
    from lopa.studies.study import Study

    path = folder / "samples.jsonl"
    run = described_in(path)
    asked = problems(run["task"], "eval", run["problems"], run["seed"])
    costs = run.get("costs", {})
    todo = Study(None, asked, run["settings"], run["seed"], SampleFile(path, run), costs=costs)
    findings = import_module(f"lopa.studies.{name}").run(todo)
    asked_for = f"--task {run['task']} --limit {run['problems']} --seed {run['seed']}"
    command = f"lopa study {name} {asked_for} --out {shlex.quote(str(folder))}"
    _tell(name, command, run, findings, folder)


def _tell(
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
        print(f"{run['task']} (eval), {run['problems']} problems, seed {run['seed']}")
        print_table(*experiment.table(findings))
        print(experiment.reading(findings))
    _plot(experiment, findings, folder / name)


def _products(llm: Any) -> dict[str, str]:
    """How products of float32 are made on a GPU, where that is a choice."""
    import torch

    fast = llm.device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32
    return {"products": "TF32"} if fast and llm.dtype == torch.float32 else {}


def _plot(experiment: Any, findings: Any, path: Path) -> None:
    from lopa.evaluation.plots import require_plots, save

    try:
        require_plots()
    except ConfigError as error:
        note(f"figures are in {path}.json; {error}")
        return
    pictures = save(experiment.plot(findings), path)
    note(f"figures and pictures are in {path.parent}: {', '.join(p.name for p in pictures)}")
