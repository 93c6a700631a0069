"""`lopa bench parallel` and `lopa bench scaling`: several devices, measured and modelled."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from lopa.cli.bench import prompts_of, rerun_as_ranks
from lopa.cli.environment import environment, environment_line
from lopa.cli.model import load
from lopa.cli.options import (
    DecodeOptions,
    JsonOption,
    ModelOptions,
    ParallelOptions,
    decode_config,
    with_decoding,
    with_model,
    with_parallel,
)
from lopa.cli.progress import Progress
from lopa.cli.terminal import print_table
from lopa.errors import ConfigError


@with_decoding("seed")
@with_parallel()
@with_model()
def bench_parallel(
    context: typer.Context,
    model: ModelOptions,
    parallel: ParallelOptions,
    decoding: DecodeOptions,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds to time.")] = 60,
    task: Annotated[str, typer.Option(help="Built-in task of the prompts.")] = "words",
    seed: Annotated[int, typer.Option(min=0, help="Seed of prompts and sampling.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """The time of a round on every rank: forward, idle, all-gather, commit, host.

    On a CPU, ranks started by this command are pinned to cores of their own.
    """
    config = decode_config(model, {**decoding, "seed": seed})
    from lopa.evaluation.evaluate import problems

    asked = problems(task, "eval", 20, seed)
    rerun_as_ranks(context, parallel, always=True)
    llm = load(model, parallel)
    from lopa.bench.parallel import as_dict, measure_ranks
    from lopa.distributed.rank_llm import RankLLM

    assert isinstance(llm, RankLLM)
    with closing(llm), Progress("timing rounds"):
        found = measure_ranks(llm, prompts_of(llm, asked), config, rounds)
    if as_json:
        line = {"host": environment(llm), **as_dict(found), "settings": config.settings()}
        print(json.dumps(line))
        return
    print(
        f"{environment_line(llm)}; BP {found.branch_parallel} × TP {found.tensor_parallel}, "
        f"{config.decoder} k={config.branches}, {found.rounds} rounds; median round "
        f"{found.median_round_ms:.1f} ms"
    )
    print(
        f"statistics {found.statistics_bytes / 1024:.1f} KB per round at most; "
        f"{found.commits} broadcasts of {found.commit_bytes / 1024:.0f} KB in total"
    )
    print_table(
        ("rank", "round ms", "forward", "idle", "all-gather", "commit", "host", "protocol"),
        [
            (
                str(rank),
                f"{r.round_ms:.2f}",
                *(f"{part:.2f}" for part in r.parts),
                f"{100 * r.protocol_share:.2f} %",
            )
            for rank, r in enumerate(found.ranks)
        ],
    )


def bench_scaling(
    measured: Annotated[Path, typer.Argument(help="Output of `lopa bench round --json`.")],
    branches: Annotated[int, typer.Option(min=0, help="Lookahead branches.")] = 7,
    window: Annotated[int, typer.Option(help="Tokens per row; one of those in the file.")] = 64,
    tpf: Annotated[
        float | None, typer.Option(help="Tokens per forward (default: the paper's, 15.55).")
    ] = None,
    bandwidth: Annotated[
        float | None, typer.Option(help="Bandwidth of the link, GB/s (default: 300).")
    ] = None,
    latency: Annotated[
        float | None, typer.Option(help="Latency of one step of a collective, µs (default: 15).")
    ] = None,
    host_ms: Annotated[
        float | None, typer.Option(help="Host time of the protocol, ms (default: 0.2).")
    ] = None,
    picture: Annotated[Path | None, typer.Option(metavar="FILE", help="Plot it to FILE.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Model the speed of more devices, from measured rounds of one device and a modelled link."""
    from lopa.bench.scaling import PAPER_TPF, Link, Scaling
    from lopa.models.checkpoint import model_config
    from lopa.models.files import read_json

    given = {
        "gigabytes_per_second": bandwidth,
        "microseconds": latency,
        "host_milliseconds": host_ms,
    }
    link = Link(**{name: value for name, value in given.items() if value is not None})
    found = read_json(measured)
    if "rounds" not in found or "host" not in found:
        raise ConfigError(f"{measured} is not the output of `lopa bench round --json`")
    tokens = tpf or PAPER_TPF
    model = Scaling(found, model_config(found["host"]["model"]), window, link)
    points = model.points(branches, tokens, (1, 2, 3, 4, 6, 8, 12, 16), (1, 2, 4, 8))
    if as_json:
        lines = [{**asdict(p), "round_ms": p.round_ms} for p in points]
        print(json.dumps({"link": asdict(link), "tpf": tokens, "points": lines}))
    else:
        print(", ".join(f"{name} {value}" for name, value in found["host"].items()))
        print(
            f"Milliseconds; k = {branches}, window {window}, TPF {tokens:g}; assumed: "
            f"{link.gigabytes_per_second:g} GB/s, {link.microseconds:g} µs per step, "
            f"{link.host_milliseconds:g} ms of host time for the protocol"
        )
        heads = ("BP × TP", "", "round", "forward", "gather", "commit", "sums", "host")
        print_table(
            (*heads, "tok/s"),
            [
                (
                    f"{p.branch_parallel} × {p.tensor_parallel}",
                    "measured" if p.measured else "modelled",
                    f"{p.round_ms:.1f}",
                    f"{p.forward_ms:.1f}",
                    f"{p.gather_ms:.2f}",
                    f"{p.commit_ms:.3f}",
                    f"{p.reduce_ms:.2f}",
                    f"{p.host_ms:.2f}",
                    f"{p.tokens_per_second:.0f}",
                )
                for p in points
            ],
        )
    if picture is not None:
        from lopa.bench.scaling_plot import plot

        host = found["host"]
        title = f"{host['model']}, {host['device']}, {host['dtype']}, k = {branches}"
        large = model.config.parameters > 5e9
        plot(points, f"{title}, window {window}", tokens, picture, paper=large)
