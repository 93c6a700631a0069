"""`lopa bench serve`: load on an endpoint."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lopa.atomic_write import check_writable
from lopa.cli.options import JsonOption
from lopa.cli.progress import Progress, start_torch
from lopa.cli.terminal import print_table
from lopa.errors import ConfigError, LopaError

if TYPE_CHECKING:
    from lopa.bench.serve_load import Load, Offered

_BUSY = 0.5  # of the client's time: with more its own queue is a part of what it measures


def bench_serve(
    url: Annotated[
        str, typer.Option(help="Base URL of the endpoint, including /v1.")
    ] = "http://127.0.0.1:8000/v1",
    rates: Annotated[str, typer.Option(help="Request rates, per second.")] = "0.5,1,2,4",
    seconds: Annotated[float, typer.Option(min=0.1, help="Duration of each rate.")] = 30.0,
    ramp: Annotated[
        bool,
        typer.Option("--ramp", help="Go through the rates and back in one run, without a break."),
    ] = False,
    branches: Annotated[
        str | None,
        typer.Option(
            metavar="A,B,…",
            help="Compare numbers of branches, such as auto,0,7 (default: the endpoint's own).",
        ),
    ] = None,
    runs: Annotated[
        int,
        typer.Option(min=1, help="Do it all so many times; another number begins each time."),
    ] = 1,
    model: Annotated[
        str | None, typer.Option(help="Model name (default: the first that is served).")
    ] = None,
    api_key: Annotated[str | None, typer.Option(envvar="LOPA_API_KEY", help="API key.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Use chat completions.")] = False,
    task: Annotated[str, typer.Option(help="Built-in task of the prompts.")] = "words",
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum new tokens.")] = 128,
    body: Annotated[
        str, typer.Option(metavar="JSON", help='Other fields of every request: {"branches": 3}.')
    ] = "{}",
    seed: Annotated[int, typer.Option(min=0, help="Seed of prompts and arrivals.")] = 0,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE", help=r"Plot it to FILE (needs lopa\[plots]).")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Send requests to an endpoint at given rates, whether or not it keeps up.

    Arrivals are a Poisson process; times count from when a request was due. Latency and time to
    first text are percentiles over completed requests, of all runs together.
    """
    offered, more = _rates(rates), _fields(body)
    compared = [None] if branches is None else _branches(branches)
    if picture is not None:
        check_writable(picture, "picture")
    start_torch()
    from lopa.evaluation.evaluate import problems

    prompts = [problem.prompt for problem in problems(task, "eval", 50, seed)]
    try:
        from lopa.bench.serve_load import (
            Endpoint,
            first_model,
            offer,
            over_envelope,
            plot_comparison,
            plot_load,
            summarise,
        )
    except ImportError as error:
        raise LopaError(f"this needs {error.name}: pip install 'lopa[serve]'") from None
    url = url.rstrip("/")
    endpoint = Endpoint(
        url=url,
        model=model or asyncio.run(first_model(url, api_key)),
        api_key=api_key,
        chat=chat,
        body={"max_tokens": max_tokens, **more},
    )
    ramps = [[*offered, *offered[-2::-1]]] if ramp else [[rate] for rate in offered]
    asked = {_name(number): endpoint.with_branches(number) for number in compared}
    answers: dict[str, list[list[Offered]]] = {name: [] for name in asked}
    for run in range(runs):
        turn = deque(asked.items())
        turn.rotate(-run)
        for name, one in turn:
            done: list[Offered] = []
            for steps in ramps:
                title = " ".join(f"{rate:g}" for rate in steps) + " requests/s"
                new = seed + run * len(steps)  # arrivals: the same for all numbers
                with Progress(title + (f", k={name}" if name else "")):
                    done += asyncio.run(offer(one, prompts, rates=steps, seconds=seconds, seed=new))
            answers[name].append(done)
    found = {
        name: [summarise(same) for same in zip(*of_runs, strict=True)]
        for name, of_runs in answers.items()
    }
    ratios = over_envelope(answers)
    if picture is not None:
        try:
            if branches is None:
                plot_load(found[""], str(picture))
            else:
                plot_comparison(found, str(picture))
        except ImportError as error:
            raise LopaError(f"the plot needs {error.name}: pip install 'lopa[plots]'") from None
    if as_json:
        settings = {"url": url, "model": endpoint.model, "task": task, **endpoint.body}
        each = [
            {**({"asked": name} if name else {}), **asdict(load)}
            for name, loads in found.items()
            for load in loads
        ]
        if ratios:
            settings["auto_over_envelope"] = [ratio and asdict(ratio) for ratio in ratios]
        print(json.dumps({**settings, "loads": each}))
        return
    print(f"{endpoint.model} at {url}; {seconds:g} s of {task} at each rate")
    print("latency and first text are p50 / p95 / p99, in seconds")
    heads = ("offered/s", "completed/s", "refused", "failed", "tokens/s", "latency", "first text")
    rows = [(name, *_row(load)) for name, loads in found.items() for load in loads]
    if branches is None:
        print_table((*heads, "branches"), [row[1:] for row in rows])
    else:
        print_table(("asked", *heads, "branches"), rows)
    if ratios:
        each_rate = ", ".join("–" if ratio is None else str(ratio) for ratio in ratios)
        print(f"a request's latency with auto over the best fixed number's, by rate: {each_rate}")
    all_loads = [load for loads in found.values() for load in loads]
    busiest = max(all_loads, key=lambda load: load.client_busy)
    if busiest.client_busy > _BUSY:
        print(
            f"at {busiest.offered:g} requests/s this client took {busiest.client_busy:.0%} of a "
            "processor: it adds to the times; ask for fewer, or from several machines"
        )


def _name(number: int | str | None) -> str:
    return "" if number is None else str(number)


def _row(load: Load) -> tuple[str, ...]:
    return (
        f"{load.offered:g}",
        f"{load.requests_per_second:.2f}",
        str(load.refused),
        str(load.failed),
        f"{load.tokens_per_second:.1f}",
        " / ".join(f"{value:.2f}" for value in load.latency.values()),
        " / ".join(f"{value:.2f}" for value in load.first_text.values()),
        "" if load.branches is None else f"{load.branches:.1f}",
    )


def _branches(text: str) -> list[int | str]:
    words = text.split(",")
    if not all(word == "auto" or word.isdecimal() for word in words):
        raise ConfigError("branches must be auto or whole numbers, separated by commas")
    return ["auto" if word == "auto" else int(word) for word in words]


def _rates(text: str) -> list[float]:
    try:
        found = [float(word) for word in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 < rate <= 10_000 for rate in found):
        raise ConfigError("rates must be numbers above 0, separated by commas")
    return found


def _fields(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ConfigError('body must be a JSON object, such as {"branches": 3}')
    return found
