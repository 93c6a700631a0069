"""`lopa study`: the experiments around lookahead decoding, one command each."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

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
    with_decoding,
)
from lopa.cli.sweep import make_folder, progress_bar
from lopa.cli.terminal import note, print_table
from lopa.errors import ConfigError
from lopa.writing import write_lines

STUDIES = ("branches", "ablation", "order", "calibration", "overhead")
_ROOM = 160  # new tokens: what an answer to a built-in task may need


@with_decoding("seed")
def study(
    name: Annotated[str, typer.Argument(help=f"Which one: {', '.join(STUDIES)}.")],
    decoding: Given,
    task: Annotated[str, typer.Option(help="words or functions.")] = "words",
    limit: Annotated[int, typer.Option(min=1, help="How many problems.")] = 20,
    seed: Annotated[int, typer.Option(min=0, help="Which problems; also for chance.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Where its files go (default: study-NAME)."),
    ] = None,
    model: ModelOption = None,
    adapter: AdapterOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    quantize: QuantizeOption = None,
    preset: PresetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run an experiment: its figures as JSON, its picture as PNG and SVG."""
    if name not in STUDIES:
        raise ConfigError(f"no study {name!r}: choose from {', '.join(STUDIES)}")
    from importlib import import_module

    from lopa.evaluation.evaluate import problems
    from lopa.evaluation.plots import require_plots, save
    from lopa.studies.study import Study

    room = {} if preset or "max_new_tokens" in decoding else {"max_new_tokens": _ROOM}
    config = decode_config(model, {**room, **decoding, "seed": seed}, preset)
    if config.decoder != "lopa" or config.most_branches == 0:
        raise ConfigError("the studies are about lookahead: use the lopa decoder with branches")
    asked = problems(task, "eval", limit, seed)
    require_plots()
    folder = make_folder(out or Path(f"study-{name}"))
    llm = load(model, adapter, device, dtype, quantize)
    experiment = import_module(f"lopa.studies.{name}")
    progress, bar = progress_bar(f"study {name}")
    done = 0

    def tick() -> None:
        nonlocal done
        done += 1
        progress(done, total)

    todo = Study(llm, asked, config.settings(), seed, tick)
    total = experiment.answers(todo)
    with bar:
        findings = experiment.run(todo)
    found = {
        "study": name,
        "command": f"lopa {shlex.join(sys.argv[1:])}",
        "task": task,
        "problems": limit,
        "seed": seed,
        "host": host(llm),
        "settings": config.settings(),
        "findings": findings,
    }
    write_lines(folder / f"{name}.json", [json.dumps(found, ensure_ascii=False, indent=1)])
    pictures = save(experiment.draw(findings), folder / name)
    if as_json:
        print(json.dumps(found, ensure_ascii=False))
        return
    print(f"{task} (eval), {limit} problems, seed {seed}")
    print_table(*experiment.table(findings))
    note(f"figures and pictures are in {folder}: {', '.join(p.name for p in pictures)}")
