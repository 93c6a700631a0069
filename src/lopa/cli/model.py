"""The model of a command: loaded with a progress bar, prompts as its token ids."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, TypeAlias, overload

from lopa.cli.options import ModelOptions, ParallelOptions
from lopa.cli.progress import Progress, start_torch
from lopa.cli.terminal import print_note, safe_for
from lopa.config import RANK_TIMEOUT
from lopa.distributed.launch import LaunchInfo, is_main_rank, launch_info
from lopa.errors import ConfigError, PromptError
from lopa.kernels import triton_start
from lopa.models import questions
from lopa.models.files import BUILT_IN

if TYPE_CHECKING:
    from lopa.config import DecodeConfig
    from lopa.engine.base_llm import BaseLLM
    from lopa.engine.llm import LLM
    from lopa.engine.output import Event, Output

_EXAMPLE = "Question: Why is the sky blue in the day and red in the evening?\nAnswer:"
# What takes a while, as progress says it
COMPILING = "compiling kernels for this GPU, once"
MEASURING = "measuring what rounds cost here, once"

Show: TypeAlias = Callable[[int, int], None]  # done, in all


@overload
def load(model: ModelOptions, parallel: None = None) -> LLM: ...
@overload
def load(model: ModelOptions, parallel: ParallelOptions | None) -> BaseLLM: ...
def load(model: ModelOptions, parallel: ParallelOptions | None = None) -> BaseLLM:
    """The model, on the ranks of `parallel`; None is for commands that run in one process only."""
    launch = launch_info()
    if parallel is None and launch is not None:
        raise ConfigError("this command runs in one process: torchrun is for generate and bench")
    if model.model is None and model.name.startswith("dummy:"):
        print_note(f"note: the built-in model is not installed; {model.name} has random weights")
    triton_start.begin_if_gpu()
    start_torch()
    from lopa.engine.llm import LLM

    # Nothing before the first tensor: the download from the hub has its own bars.
    with Progress() as progress:
        show = partial(progress.update, title=f"loading {model.name}", unit="tensors")
        if parallel is not None and launch is not None:
            return _load_rank(model, parallel, launch, show)
        if parallel is not None and parallel.ranks > 1:
            return _load_parallel(model, parallel, show)
        compiling = partial(progress.update, title=COMPILING)
        return LLM(model.name, progress=show, compiling=compiling, **model.llm_options)


def _load_rank(
    model: ModelOptions, parallel: ParallelOptions, launch: LaunchInfo, show: Show
) -> BaseLLM:
    """This process is a rank of a launcher."""
    from lopa.distributed.placement import join
    from lopa.distributed.rank_llm import RankLLM

    options = model.llm_options
    mesh = join(
        launch,
        branch_parallel=parallel.branch_parallel,
        tensor_parallel=parallel.tensor_parallel or 1,
        device=options.pop("device", "auto"),
        timeout=parallel.rank_timeout or RANK_TIMEOUT,
    )
    return RankLLM(model.name, mesh=mesh, progress=show, **options)


def _load_parallel(model: ModelOptions, parallel: ParallelOptions, show: Show) -> BaseLLM:
    """This process starts its own ranks."""
    from lopa.distributed.parallel_llm import ParallelLLM

    return ParallelLLM(
        model.name,
        branch_parallel=parallel.branch_parallel or 1,
        tensor_parallel=parallel.tensor_parallel or 1,
        rank_timeout=parallel.rank_timeout or RANK_TIMEOUT,
        report=lambda line: print_note(f"note: {line}"),
        progress=show,
        **model.llm_options,
    )


def prepare_cost(llm: BaseLLM, *configs: DecodeConfig) -> float:
    """Have what rounds cost, if branches auto asks for it; the seconds that measuring it took."""
    asks = any(c.branches == "auto" and c.objective == "speed" for c in configs)
    if not asks or llm.knows_round_cost:
        return 0.0
    with Progress(MEASURING):
        _ = llm.round_cost
    return llm.cost_seconds


def broadcast_text(llm: BaseLLM, text: str) -> str:
    """Rank 0's text, on every rank."""
    mesh = getattr(llm, "mesh", None)
    return text if mesh is None else str(mesh.broadcast_object(text))


def example(model: str, seed: int | None = None) -> str:
    """A prompt that suits the model; of the built-in one a question, others by their seeds."""
    if model not in BUILT_IN:
        return _EXAMPLE
    if seed is None:
        return questions.WORD_PROBLEM
    from lopa.tasks import generate

    return generate("words", seed, "eval").prompt


def read_prompt(argument: str) -> str:
    """The prompt as given, or all of standard input for `-`, without its last line break."""
    if argument != "-":
        text = argument
    elif not is_main_rank():
        return ""  # rank 0 reads it: see `broadcast_text`
    else:
        text = read_input(sys.stdin.read).removesuffix("\n")
    if not text:
        raise PromptError("the prompt is empty: give at least one token")
    return text


def read_input(read: Callable[[], str]) -> str:
    """Text of standard input, which must be UTF-8."""
    try:
        text = read()
        text.encode()  # Python may let other bytes pass, as lone surrogates
    except UnicodeError:
        raise PromptError(
            "standard input is not UTF-8 text: convert it first (iconv -f ENCODING -t utf-8)"
        ) from None
    return text


def check_question(llm: BaseLLM, text: str, config: DecodeConfig) -> None:
    """PromptError, which says what it can do, for text that the built-in model cannot read."""
    if llm.tokenizer is not None and llm.tokenizer.is_built_in and not config.is_constrained:
        questions.check(text)


def encode(llm: BaseLLM, text: str, chat: bool, *, whole: bool = True) -> list[int]:
    """The token ids of a prompt; for a model without a tokenizer, the ids as typed.

    whole: see `BaseLLM.encode`.
    """
    if chat:
        return llm.encode([{"role": "user", "content": text}])
    if llm.tokenizer is not None:
        return llm.encode(text, whole=whole)
    words = re.split(r"[\s,]+", text.strip(" \t\n,"))
    if not all(re.fullmatch(r"[0-9]+", word) for word in words):
        raise PromptError(
            "this model has no tokenizer: give the prompt as token ids, "
            "separated by spaces or commas"
        )
    return llm.encode([int(word) for word in words])


def follow(events: Iterator[Event], live: bool) -> Output:
    """The output at the end of a stream. live: its text is printed as it becomes final."""
    with Progress("decoding", "rounds") as progress:
        for event in events:
            progress.update(event.round.index)
            if live and event.text:
                progress.close()
                print(safe_for(sys.stdout.isatty(), event.text), end="", flush=True)
    assert event.output is not None
    return event.output


def output_text(llm: BaseLLM, output: Output) -> str:
    """What is printed: the text, or the token ids where the model has no tokenizer."""
    return output.text if llm.tokenizer is not None else " ".join(map(str, output.token_ids))
