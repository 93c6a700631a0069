"""`lopa generate`: decode one prompt."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from typing import TYPE_CHECKING, Annotated

import typer

from lopa.atomic_write import check_writable
from lopa.cli.model import broadcast_text, encode, load, output_text, read_prompt
from lopa.cli.options import (
    ChatOption,
    DecodeOptions,
    JsonOption,
    ModelOptions,
    ParallelOptions,
    TraceOption,
    decode_config,
    with_decoding,
    with_model,
    with_parallel,
)
from lopa.cli.terminal import print_note, safe_for, statistics
from lopa.distributed.launch import is_main_rank

if TYPE_CHECKING:
    from lopa.engine.session import Output, Session


@with_decoding()
@with_parallel()
@with_model()
def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from standard input.")],
    model: ModelOptions,
    parallel: ParallelOptions,
    decoding: DecodeOptions,
    chat: ChatOption = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Show every round live on standard error.")
    ] = False,
    trace: TraceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Decode a prompt: the text on standard output, a line of statistics on standard error."""
    text = read_prompt(prompt)
    config = decode_config(model, decoding)
    if trace is not None and is_main_rank():
        check_writable(trace, "trace")
    with (
        closing(load(model, parallel)) as llm,
        closing(llm.session(encode(llm, broadcast_text(llm, text), chat), config)) as session,
    ):
        # A pipe gets the text at the end, in one piece; a terminal gets it as it becomes final.
        live = sys.stdout.isatty() and not (watch or as_json or session.tokenizer is None)
        output = _watched(session) if watch else _run(session, live)
    if trace is not None and is_main_rank():
        from lopa.trace import write

        write(output.trace, trace)
    if as_json:
        print(json.dumps(output.summary(), ensure_ascii=False))
        return
    print("" if live else safe_for(sys.stdout.isatty(), output_text(llm, output)), flush=True)
    print_note(statistics(output))


def _run(session: Session, live: bool) -> Output:
    while (event := session.step(ahead=True)) is not None:
        if live:
            print(safe_for(True, event.text), end="", flush=True)
    assert session.output is not None
    return session.output


def _watched(session: Session) -> Output:
    from lopa.cli.watch import Watch

    with Watch(session) as view:
        while (event := session.step(ahead=True)) is not None:
            view.show(event)
    assert session.output is not None
    return session.output
