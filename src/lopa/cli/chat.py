"""`lopa chat`: a conversation. Its history is what the model is given each time."""

from __future__ import annotations

import contextlib
import sys
from contextlib import closing
from typing import TYPE_CHECKING

from lopa.cli.model import answer_text, encode, load
from lopa.cli.options import (
    AdapterOption,
    DeviceOption,
    DtypeOption,
    Given,
    ModelOption,
    PresetOption,
    QuantizeOption,
    decode_config,
    with_decoding,
)
from lopa.cli.terminal import note, one_line, safe_for, statistics
from lopa.errors import LopaError

if TYPE_CHECKING:
    from lopa.config import DecodeConfig
    from lopa.engine.llm import LLM

_HELP = """\
/reset  forget the conversation
/quit   leave (so does Ctrl-D)
/help   this list
Ctrl-C  stop the answer"""


@with_decoding()
def chat(
    decoding: Given,
    model: ModelOption = None,
    adapter: AdapterOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    quantize: QuantizeOption = None,
    preset: PresetOption = None,
) -> None:
    """Talk with a model; its answers appear as they settle."""
    config = decode_config(model, decoding, preset)
    llm = load(model, adapter, device, dtype, quantize)
    interactive = sys.stdin.isatty()
    conversation = Conversation(llm, config)
    if not conversation.remembers:
        note("note: this model has no chat template: each line is a prompt by itself")
    if interactive:
        note(f"{llm.name}, decoded by {config.decoder}. /help lists the commands.")
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 (gives input() its editing and history)
    while (line := _read_line(interactive)) is not None:
        command = line.strip()
        if command == "/quit":
            return
        if command == "/reset":
            conversation.reset()
            note("the conversation is forgotten")
        elif command == "/help":
            note(_HELP)
        elif command.startswith("/"):
            note(f"there is no {one_line(command)}: /help lists the commands")
        elif command:
            _reply(conversation, line, interactive)


class Conversation:
    """The messages so far. A turn that does not come to its end leaves no mark on them."""

    def __init__(self, llm: LLM, config: DecodeConfig) -> None:
        self.llm = llm
        self.config = config
        self.messages: list[dict[str, str]] = []
        self.remembers = llm.tokenizer is not None and llm.tokenizer.chat_template is not None

    def reset(self) -> None:
        self.messages.clear()

    def answer(self, line: str) -> str:
        """Answer a line, printing what is settled as it settles; returns the figures."""
        said = {"role": "user", "content": line}
        if self.remembers:
            ids = self.llm.encode([*self.messages, said])
        else:
            ids = encode(self.llm, line, chat=False)
        terminal = sys.stdout.isatty()
        with closing(self.llm.engine(max_running=1)) as engine:
            for event in engine.stream(self.llm.session(ids, self.config)):
                print(safe_for(terminal, event.text), end="", flush=True)
        output = event.output
        assert output is not None
        print(answer_text(self.llm, output) if self.llm.tokenizer is None else "", flush=True)
        if self.remembers:
            self.messages += [said, {"role": "assistant", "content": output.text}]
        return statistics(output)


def _read_line(interactive: bool) -> str | None:
    """The next line; None at the end."""
    if not interactive:
        line = sys.stdin.readline()
        return line.removesuffix("\n") if line else None
    while True:
        try:
            return input("> ")
        except EOFError:
            print()
            return None
        except KeyboardInterrupt:
            print()
            note("Ctrl-D or /quit leaves")


def _reply(conversation: Conversation, line: str, interactive: bool) -> None:
    if not interactive:
        note(conversation.answer(line))
        return
    try:
        note(conversation.answer(line))
    except KeyboardInterrupt:
        print()
        note("stopped; the turn is forgotten")
    except LopaError as error:  # too long a conversation, say: the user can still /reset
        note(f"error: {one_line(str(error))}")
