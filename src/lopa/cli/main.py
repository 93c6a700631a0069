"""The `lopa` command: its subcommands and its errors.

An error that the user can fix is one line on standard error. Exit codes: 0 success, 1 failure (a
missing or broken model, out of memory, a full disk), 2 wrong usage (an option, the prompt), 130
interrupted. A traceback is a bug in lopa.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from lopa.cli.bench import bench
from lopa.cli.bench_parallel import bench_parallel, bench_scaling
from lopa.cli.bench_serve import bench_serve
from lopa.cli.chat import chat
from lopa.cli.evaluate import evaluate
from lopa.cli.generate import generate
from lopa.cli.info import doctor, models
from lopa.cli.model_check import check
from lopa.cli.race import race
from lopa.cli.serve import ENVIRONMENT, serve
from lopa.cli.study import study
from lopa.cli.terminal import one_line
from lopa.cli.warmup import warmup
from lopa.distributed.launch import await_end_by_launcher, is_main_rank, launch_info
from lopa.errors import ConfigError, DeviceError, LopaError, PromptError
from lopa.thread_waits import wait_briefly
from lopa.version import VERSION

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (generate, race, chat, study, warmup, doctor):
    app.command()(command)
app.command("eval")(evaluate)
bench.command("parallel")(bench_parallel)
bench.command("scaling")(bench_scaling)
bench.command("serve")(bench_serve)
app.command(context_settings={"auto_envvar_prefix": ENVIRONMENT})(serve)
models.command("check")(check)
app.add_typer(models, name="models")
app.add_typer(bench, name="bench")


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"lopa {VERSION}")
        raise typer.Exit


@app.callback()
def lopa(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Lookahead parallel decoding for diffusion language models."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, `sys.argv` unless arguments are given; returns the exit code."""
    wait_briefly()
    # A stream that the caller has closed is not an error.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    if not is_main_rank():
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        # Characters that the terminal's encoding lacks are escaped.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        given = sys.argv[1:] if arguments is None else list(arguments)
        code = app(given, prog_name="lopa", standalone_mode=False, obj=given)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except typer.TyperException as error:
        message = error.format_message()
        if message:  # none where the help was printed instead
            context = getattr(error, "ctx", None)
            path = context.command_path if context else "lopa"
            _print_error(f"{message.rstrip('.')}: see {path} --help")
        return error.exit_code
    except (ConfigError, PromptError) as error:
        if not is_main_rank():  # nearly always the same on every rank: rank 0 prints it
            await_end_by_launcher()
        _print_error(str(error))
        return 2
    except DeviceError as error:
        _print_error(str(error))
        return 2
    except LopaError as error:
        _print_error(str(error))
        return 1
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except BrokenPipeError:
        return _close_pipe()
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        _print_error(f"{place}{error.strerror or error}")
        return 1
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        size = re.search(r"tried to allocate ([\d.]+ \w+)", str(error), re.IGNORECASE)
        _print_error(
            f"out of memory{f' (tried to allocate {size[1]})' if size else ''}: try fewer "
            "branches, fewer new tokens, a shorter prompt, --dtype bfloat16 or another --device"
        )
        return 1


def _print_error(message: str) -> None:
    launch = launch_info()
    rank = f"rank {launch.rank}: " if launch is not None and launch.rank else ""
    print(f"{rank}error: {one_line(message)}", file=sys.stderr)


def _close_pipe() -> int:
    """The reader has closed the pipe (`| head`)."""
    # Python flushes standard output once more on exit, which must not fail again.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1


def _is_out_of_memory(error: MemoryError | RuntimeError) -> bool:
    # By name, not by class: this must not import torch. CPU allocations fail as RuntimeError.
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or "DefaultCPUAllocator" in str(error)
    )
