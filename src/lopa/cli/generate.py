"""`lopa generate`: one prompt, one answer."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Annotated

import typer

from lopa.atomic_write import check_writable
from lopa.cli.model import Devices, answer_text, encode, load, read_prompt, same_for_all
from lopa.cli.options import (
    AdapterOption,
    BranchParallelOption,
    ChatOption,
    DeviceOption,
    DtypeOption,
    Given,
    JsonOption,
    ModelOption,
    PresetOption,
    QuantizeOption,
    RankTimeoutOption,
    TensorParallelOption,
    TraceOption,
    decode_config,
    with_decoding,
)
from lopa.cli.terminal import note, safe_for, statistics
from lopa.distributed.launch import speaks

if TYPE_CHECKING:
    from lopa.engine.output import Event, Output
    from lopa.engine.session import Session


@with_decoding()
def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from standard input.")],
    decoding: Given,
    model: ModelOption = None,
    adapter: AdapterOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    quantize: QuantizeOption = None,
    preset: PresetOption = None,
    branch_parallel: BranchParallelOption = None,
    tensor_parallel: TensorParallelOption = None,
    rank_timeout: RankTimeoutOption = None,
    chat: ChatOption = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Show the rounds as they happen, on standard error.")
    ] = False,
    trace: TraceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Answer a prompt: the text on standard output, a line of figures on standard error."""
    text = read_prompt(prompt)
    config = decode_config(model, decoding, preset)
    if trace is not None and speaks():
        check_writable(trace, "trace")
    devices = Devices(branch_parallel, tensor_parallel, rank_timeout)
    with load(model, adapter, device, dtype, quantize, devices) as llm:
        session = llm.session(encode(llm, same_for_all(llm, text), chat), config)
        # A pipe gets the answer whole or not at all; a terminal sees it grow.
        live = sys.stdout.isatty() and not (watch or as_json or session.tokenizer is None)
        with closing(llm.engine(max_running=1)) as engine:
            events = engine.stream(session)
            output = _watched(session, events) if watch else _run(events, live)
    if trace is not None and speaks():
        from lopa.trace import write

        write(output.trace, trace)
    if as_json:
        print(json.dumps(output.summary(), ensure_ascii=False))
        return
    print("" if live else safe_for(sys.stdout.isatty(), answer_text(llm, output)), flush=True)
    note(statistics(output))


def _run(events: Iterator[Event], live: bool) -> Output:
    for event in events:
        if live:
            print(safe_for(True, event.text), end="", flush=True)
    assert event.output is not None
    return event.output


def _watched(session: Session, events: Iterator[Event]) -> Output:
    from lopa.cli.watch import Watch

    with Watch(session) as view:
        for event in events:
            view.show(event)
    assert session.output is not None
    return session.output
