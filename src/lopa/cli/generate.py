"""`lopa generate`: one prompt, one answer."""

from __future__ import annotations

import json
import sys
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
    from lopa.engine.session import Output, Session


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
    with (
        closing(load(model, adapter, device, dtype, quantize, devices)) as llm,
        closing(llm.session(encode(llm, same_for_all(llm, text), chat), config)) as session,
    ):
        # A pipe gets the answer whole or not at all; a terminal sees it grow.
        live = sys.stdout.isatty() and not (watch or as_json or session.tokenizer is None)
        output = _watched(session) if watch else _run(session, live)
    if trace is not None and speaks():
        from lopa.trace import write

        write(output.trace, trace)
    if as_json:
        print(json.dumps(output.summary(), ensure_ascii=False))
        return
    print("" if live else safe_for(sys.stdout.isatty(), answer_text(llm, output)), flush=True)
    note(statistics(output))


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
