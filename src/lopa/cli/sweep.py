"""`lopa eval … --sweep`: a folder with samples, a report, plots and a page."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lopa.atomic_write import write_lines
from lopa.cli.environment import environment
from lopa.cli.progress import Progress
from lopa.cli.terminal import print_note, print_table
from lopa.errors import ConfigError

if TYPE_CHECKING:
    from lopa.config import DecodeConfig
    from lopa.engine.llm import LLM
    from lopa.evaluation.benchmark import Benchmark


def run_sweep(
    words: Sequence[str],
    configure: Callable[[Mapping[str, Any]], DecodeConfig],  # options of a combination → config
    load: Callable[[], LLM],
    *,
    benchmark: Benchmark,
    batch_size: int,
    out: Path | None,
    as_json: bool,
) -> None:
    from lopa.evaluation.plots import plot_sweep, require_plots
    from lopa.evaluation.report_page import HEADS, make_page, rows
    from lopa.evaluation.sample import SampleFile
    from lopa.evaluation.sweep import Sweep, combinations, parse_axes, setting_name

    axes = parse_axes(words)
    settings = {setting_name(o): configure(o).settings() for o in combinations(axes)}
    sweep = Sweep(benchmark, axes, configure)
    require_plots()
    folder = make_folder(out or Path(f"sweep-{benchmark.name}"))
    llm = load()
    run = {**benchmark.described(), "settings": settings}
    file = SampleFile(folder / "samples.jsonl", run | {"host": environment(llm)})
    progress = Progress(benchmark.title, "answers")
    with says_how_to_go_on(folder, lambda: sweep.done(file), sweep.answers), progress:
        sweep.run(llm, file, batch_size, lambda: progress.update(sweep.done(file), sweep.answers))
    report = {**run, "host": environment(llm), "batch_size": batch_size, **sweep.report(file)}
    write_lines(folder / "report.json", [json.dumps(report, ensure_ascii=False, indent=1)])
    plots = plot_sweep(report, folder)
    title = benchmark.title
    lines = [
        ", ".join(f"{name} {value}" for name, value in report["host"].items()),
        *(
            f"AUP {curve['aup']:.1f} along {next(iter(axes))}"
            + (f" with {setting_name(curve['shared'])}" if curve["shared"] else "")
            for curve in report["curves"]
        ),
    ]
    figures = [path for path in plots if path.suffix == ".svg"]
    page = make_page(title, lines, HEADS, rows(report), figures)
    write_lines(folder / "report.html", [page])
    if as_json:
        print(json.dumps(report, ensure_ascii=False))
        return
    print(title)
    print_table(HEADS, rows(report))
    for line in lines[1:]:
        print(line)
    print_note(f"samples, report and plots are in {folder}: see report.html")


@contextmanager
def says_how_to_go_on(place: Path | None, done: Callable[[], int], total: int) -> Iterator[None]:
    """When it is interrupted, say what is kept and how to go on. place: where answers are kept."""
    try:
        yield
    except KeyboardInterrupt:
        if place is None:
            print_note("stopped; nothing is kept: with --samples FILE a run can go on")
        else:
            print_note(
                f"stopped; {done()} of {total} answers are kept in {place}: the same command goes "
                "on from there"
            )
        raise


def make_folder(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot write to {folder} ({error.strerror}): choose another --out"
        ) from None
    return folder
