"""`lopa generate`: decode one prompt."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Annotated

import typer

from lopa.atomic_write import check_writable
from lopa.cli.model import (
    broadcast_text,
    check_question,
    encode,
    example,
    follow,
    load,
    output_text,
    prepare_cost,
    read_prompt,
)
from lopa.cli.options import (
    ChatOption,
    DecodeOptions,
    JsonOption,
    ModelOptions,
    ParallelOptions,
    TraceOption,
    numbers,
    waiting_config,
    with_decoding,
    with_model,
    with_parallel,
)
from lopa.cli.terminal import print_note, safe_for, statistics
from lopa.config import WAITING_BRANCHES
from lopa.distributed.launch import is_main_rank
from lopa.errors import ConfigError

if TYPE_CHECKING:
    from lopa.engine.output import Event, Output
    from lopa.engine.prompts import Prompt
    from lopa.engine.session import Session


@with_decoding(branches=WAITING_BRANCHES)
@with_parallel()
@with_model()
def generate(
    model: ModelOptions,
    parallel: ParallelOptions,
    decoding: DecodeOptions,
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; - reads it from standard input.")
    ] = None,
    use_example: Annotated[
        bool,
        typer.Option("--example", help="Ask an example in place of a prompt; --seed chooses it."),
    ] = False,
    chat: ChatOption = False,
    suffix: Annotated[
        str | None,
        typer.Option(help="Fill the gap between the prompt and this text; prints the gap's text."),
    ] = None,
    gap_tokens: Annotated[
        str | None,
        typer.Option(
            metavar="N[,N]...",
            help="With --suffix: tokens of the gap, or lengths to choose from (default: lengths "
            "up to --max-new-tokens are tried).",
        ),
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Show every round live on standard error.")
    ] = False,
    trace: TraceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Decode a prompt: the text on standard output, a line of statistics on standard error."""
    if (prompt is None) != use_example:
        raise ConfigError("give a prompt, or --example to see one answered, and not both")
    text = example(model.name, decoding.get("seed")) if prompt is None else read_prompt(prompt)
    if gap_tokens is not None and suffix is None:
        raise ConfigError("--gap-tokens goes with --suffix: give both, or neither")
    lengths = None if gap_tokens is None else numbers("gap-tokens", gap_tokens, 1)
    if lengths is not None:
        decoding = {"max_new_tokens": max(lengths), **decoding}
    config = waiting_config(model, decoding)
    if trace is not None and is_main_rank():
        check_writable(trace, "trace")
    if use_example:
        print_note(safe_for(sys.stderr.isatty(), text))
    with load(model, parallel) as llm:
        from lopa.engine.prompts import Infill

        text = broadcast_text(llm, text)
        if suffix is None:
            check_question(llm, text, config)
        ids = encode(llm, text, chat, whole=suffix is None)
        cost_seconds = prepare_cost(llm, config)
        asked: Prompt = ids
        if suffix is not None:
            asked = Infill(ids, ((lengths, encode(llm, suffix, chat=False, whole=False)),))
        session = llm.session(asked, config)
        # A pipe gets the text at the end, in one piece; a terminal gets it as it becomes final.
        live = sys.stdout.isatty() and not (watch or as_json or session.tokenizer is None)
        with closing(llm.engine(max_running=1)) as engine:
            events = engine.stream(session)
            output = _watched(session, events) if watch else follow(events, live)
    if trace is not None and is_main_rank():
        from lopa.trace import write

        write(output.trace, trace)
    if as_json:
        print(json.dumps({**output.summary(), "cost_seconds": cost_seconds}, ensure_ascii=False))
        return
    print("" if live else safe_for(sys.stdout.isatty(), output_text(llm, output)), flush=True)
    print_note(statistics(output, cost_seconds))


def _watched(session: Session, events: Iterator[Event]) -> Output:
    from lopa.cli.watch import Watch

    with Watch(session) as view:
        for event in events:
            view.show(event)
    assert session.output is not None
    return session.output
