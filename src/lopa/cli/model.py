"""A model for a command: loaded with a bar on the terminal, and prompts in its terms."""

from __future__ import annotations

import re
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

from lopa.cli.options import default_model
from lopa.cli.terminal import note, notes
from lopa.config import RANK_TIMEOUT
from lopa.distributed.launch import launched, speaks
from lopa.errors import ConfigError, PromptError

if TYPE_CHECKING:
    from types import TracebackType

    from rich.console import Console

    from lopa.engine.llm import LLM, BaseLLM
    from lopa.engine.output import Output

_PATIENCE = 1.0  # seconds of loading without a bar


@dataclass(frozen=True, slots=True)
class Devices:
    """How many devices, as asked for on the command line."""

    branch_parallel: int | None = None
    tensor_parallel: int | None = None
    rank_timeout: float | None = None

    @property
    def ranks(self) -> int:
        return (self.branch_parallel or 1) * (self.tensor_parallel or 1)


@overload
def load(
    model: str | None,
    adapter: str | None,
    device: str | None,
    dtype: str | None,
    quantize: str | None = None,
    devices: None = None,
) -> LLM: ...
@overload
def load(
    model: str | None,
    adapter: str | None,
    device: str | None,
    dtype: str | None,
    quantize: str | None,
    devices: Devices | None,
) -> BaseLLM: ...
def load(
    model: str | None,
    adapter: str | None,
    device: str | None,
    dtype: str | None,
    quantize: str | None = None,
    devices: Devices | None = None,  # None: the command knows one process only
) -> BaseLLM:
    """The model asked for; what is None is left to the defaults of `LLM`."""
    name = model or default_model()
    if devices is None and launched() is not None:
        raise ConfigError("this command runs in one process: torchrun is for generate and bench")
    if model is None and name.startswith("dummy:"):
        note(f"note: the built-in model is not installed; {name} has random weights")
    console = notes()
    with console.status("starting torch") if console.is_terminal else nullcontext():
        from lopa.engine.llm import LLM

    options: dict[str, Any] = {
        "adapter": adapter,
        "device": device,
        "dtype": dtype,
        "quantize": quantize,
    }
    given = {key: value for key, value in options.items() if value is not None}
    with _Bar(console, name) as bar:
        if devices is not None and (launched() is not None or devices.ranks > 1):
            return _load_parallel(name, given, devices, bar)
        return LLM(name, progress=bar.show, **given)


def _load_parallel(name: str, given: dict[str, Any], devices: Devices, bar: _Bar) -> BaseLLM:
    launch = launched()
    timeout = devices.rank_timeout or RANK_TIMEOUT
    if launch is not None:
        from lopa.distributed.placement import join
        from lopa.distributed.rank_llm import RankLLM

        mesh = join(
            launch,
            branch_parallel=devices.branch_parallel,
            tensor_parallel=devices.tensor_parallel or 1,
            device=given.pop("device", "auto"),
            timeout=timeout,
        )
        return RankLLM(name, mesh=mesh, progress=bar.show, **given)
    from lopa.distributed.parallel_llm import ParallelLLM

    return ParallelLLM(
        name,
        branch_parallel=devices.branch_parallel or 1,
        tensor_parallel=devices.tensor_parallel or 1,
        rank_timeout=timeout,
        report=lambda line: note(f"note: {line}"),
        **given,
    )


def same_for_all(llm: BaseLLM, text: str) -> str:
    """What rank 0 read, on every rank."""
    mesh = getattr(llm, "mesh", None)
    return text if mesh is None else str(mesh.broadcast_object(text))


class _Bar:
    """A bar for a load that takes long, on a terminal; nothing otherwise."""

    def __init__(self, console: Console, name: str) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress = Progress(
            TextColumn("loading {task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.completed}/{task.total} tensors"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self._task = self._progress.add_task(name, total=None)
        self._terminal = console.is_terminal
        self._began = time.monotonic()

    def __enter__(self) -> _Bar:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._progress.live.is_started:  # stopping it otherwise prints an empty line
            self._progress.stop()

    def show(self, done: int, total: int) -> None:
        # Not before the first tensor: fetching from the hub shows bars of its own.
        if self._terminal and time.monotonic() - self._began > _PATIENCE:
            self._progress.start()
            self._progress.update(self._task, completed=done, total=total)


def read_prompt(argument: str) -> str:
    """The prompt as given, or all of standard input for `-`, without its last line break."""
    if argument != "-":
        text = argument
    elif not speaks():
        return ""  # rank 0 reads it: see `same_for_all`
    else:
        try:
            text = sys.stdin.read().removesuffix("\n")
        except UnicodeDecodeError:
            raise PromptError("standard input is not UTF-8 text: convert it first") from None
    if not text:
        raise PromptError("the prompt is empty: give at least one token")
    return text


def encode(llm: BaseLLM, text: str, chat: bool) -> list[int]:
    """Token ids of what a user typed; a model without a tokenizer takes the ids themselves."""
    if chat:
        return llm.encode([{"role": "user", "content": text}])
    if llm.tokenizer is not None:
        return llm.encode(text)
    words = re.split(r"[\s,]+", text.strip(" \t\n,"))
    if not all(re.fullmatch(r"[0-9]+", word) for word in words):
        raise PromptError(
            "this model has no tokenizer: give the prompt as token ids, "
            "separated by spaces or commas"
        )
    return llm.encode([int(word) for word in words])


def answer_text(llm: BaseLLM, output: Output) -> str:
    """What is printed as the answer: its text, or its ids where the model has no tokenizer."""
    return output.text if llm.tokenizer is not None else " ".join(map(str, output.token_ids))
