"""`lopa warmup`: what the first run of a model on a GPU would do, ahead of it."""

from __future__ import annotations

import json
import time
from functools import partial
from typing import Annotated, Any

import typer

from lopa.cache_folder import cache_folder
from lopa.cli.model import COMPILING, MEASURING, load
from lopa.cli.options import JsonOption, ModelOptions, with_model
from lopa.cli.progress import Progress
from lopa.cli.terminal import print_note


@with_model("preset", "round_cost")
def warmup(
    model: ModelOptions,
    tokens: Annotated[
        int,
        typer.Option(
            min=0,
            help="Capture the graphs of rounds of up to so many tokens, to try.",
        ),
    ] = 1024,
    as_json: JsonOption = False,
) -> None:
    """Compile a model's kernels and measure its rounds, and keep both on disk.

    For an init container, or an image that is made where there is such a GPU: later runs on the
    same kind of GPU start without it.
    """
    clock = _Clock()
    llm = load(model)
    clock.note("load")
    with Progress() as progress:
        kernels = llm.compile_kernels(partial(progress.update, title=COMPILING))
    clock.note("compile")
    is_kept = llm.knows_round_cost
    if llm.measures_cost and not is_kept:
        with Progress(MEASURING):
            _ = llm.round_cost
    clock.note("cost")
    with Progress("capturing graphs") as progress:
        graphs = llm.capture_graphs(tokens, progress.update) if tokens else 0
    clock.note("graphs")
    kept = {"round_cost": str(cache_folder("round_cost"))}
    if kernels:
        from lopa.kernels.compilation import triton_folder
        from lopa.kernels.hopper.binary_cache import binary_folder

        kept |= {"triton": str(triton_folder()), "cuda": str(binary_folder())}
    found: dict[str, Any] = {
        "model": llm.name,
        "device": str(llm.device),
        "backend": type(llm.runner.backend).__name__,
        "kernels": [tuple(one) for one in kernels],
        "graphs": graphs,
        "cost_was_kept": is_kept,
        "kept_in": kept,
        "seconds": clock.seconds,
    }
    if as_json:
        print(json.dumps(found, ensure_ascii=False))
    else:
        print(_closing_line(found))
    for one in kernels:
        if one.error is not None:
            print_note(f"note: the kernel {one.name} was not compiled: {one.error}")


def _closing_line(found: dict[str, Any]) -> str:
    seconds, kept = found["seconds"], found["kept_in"]
    parts = [f"loaded in {seconds['load']:.1f} s"]
    if found["kernels"]:
        spent = sum(one[1] for one in found["kernels"])
        parts.append(
            f"{len(found['kernels'])} kernels ({spent:.1f} s of one CPU) in {kept['triton']}"
        )
    else:
        parts.append(f"no kernels to compile on {found['device']}")
    if found["cost_was_kept"]:
        parts.append("what rounds cost was known")
    else:
        parts.append(f"rounds measured in {seconds['cost']:.1f} s, kept in {kept['round_cost']}")
    if found["graphs"]:
        parts.append(f"{found['graphs']} graphs captured in {seconds['graphs']:.1f} s")
    return f"{found['model']} is ready after {sum(seconds.values()):.1f} s: {'; '.join(parts)}"


class _Clock:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._since = time.perf_counter()

    def note(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase], self._since = now - self._since, now
