"""`lopa chat`: a conversation. The prompt of a turn is the whole history."""

from __future__ import annotations

import contextlib
import sys
from contextlib import closing
from typing import TYPE_CHECKING

from lopa.cli.model import (
    check_question,
    encode,
    example,
    follow,
    load,
    output_text,
    prepare_cost,
    read_input,
)
from lopa.cli.options import (
    DecodeOptions,
    ModelOptions,
    waiting_config,
    with_decoding,
    with_model,
)
from lopa.cli.terminal import one_line, print_note, statistics
from lopa.config import WAITING_BRANCHES
from lopa.errors import LopaError
from lopa.models.questions import ABOUT

if TYPE_CHECKING:
    from lopa.config import DecodeConfig
    from lopa.engine.llm import LLM

_HELP = """\
/example  ask an example
/reset    clear the conversation
/quit     leave (so does Ctrl-D)
/help     this list
Ctrl-C    stop the reply"""


@with_decoding(branches=WAITING_BRANCHES)
@with_model()
def chat(model: ModelOptions, decoding: DecodeOptions) -> None:
    """Chat with a model; text appears as it becomes final."""
    config = waiting_config(model, decoding)
    llm = load(model)
    interactive = sys.stdin.isatty()
    conversation = Conversation(llm, config)
    if llm.tokenizer is not None and llm.tokenizer.is_built_in:
        print_note(f"note: the built-in model solves {ABOUT}: each line is one; /example asks one")
    elif not conversation.keeps_history:
        print_note("note: this model has no chat template: each line is a prompt of its own")
    if interactive:
        print_note(f"{llm.name}, decoded by {config.decoder}. /help lists the commands.")
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 (gives input() its editing and history)
    while (line := _read_line(interactive)) is not None:
        command = line.strip()
        if command == "/quit":
            return
        if command == "/reset":
            conversation.reset()
            print_note("conversation cleared")
        elif command == "/help":
            print_note(_HELP)
        elif command == "/example":
            asked = example(llm.name)
            print_note(asked)
            _reply(conversation, asked, interactive)
        elif command.startswith("/"):
            print_note(f"there is no {one_line(command)}: /help lists the commands")
        elif command:
            _reply(conversation, line, interactive)


class Conversation:
    """The messages so far. A turn that is interrupted or fails is not added.

    Without a chat template, and with the built-in model, every turn stands alone.
    """

    def __init__(self, llm: LLM, config: DecodeConfig) -> None:
        self.llm = llm
        self.config = config
        self.messages: list[dict[str, str]] = []
        tokenizer = llm.tokenizer
        has_template = tokenizer is not None and tokenizer.chat_template is not None
        self.keeps_history = has_template and not (tokenizer and tokenizer.is_built_in)

    def reset(self) -> None:
        self.messages.clear()

    def reply(self, line: str) -> str:
        """Reply to a line, printing text as it becomes final; returns the line of statistics."""
        message = {"role": "user", "content": line}
        if self.keeps_history:
            ids = self.llm.encode([*self.messages, message])
        else:
            check_question(self.llm, line, self.config)
            ids = encode(self.llm, line, chat=False)
        cost_seconds = prepare_cost(self.llm, self.config)
        with closing(self.llm.engine(max_running=1)) as engine:
            output = follow(engine.stream(self.llm.session(ids, self.config)), live=True)
        print(output_text(self.llm, output) if self.llm.tokenizer is None else "", flush=True)
        if self.keeps_history:
            self.messages += [message, {"role": "assistant", "content": output.text}]
        return statistics(output, cost_seconds)


def _read_line(interactive: bool) -> str | None:
    """The next line; None at the end of input."""
    if not interactive:
        line = read_input(sys.stdin.readline)
        return line.removesuffix("\n") if line else None
    while True:
        try:
            return input("> ")
        except EOFError:
            print()
            return None
        except KeyboardInterrupt:
            print()
            print_note("Ctrl-D or /quit leaves")


def _reply(conversation: Conversation, line: str, interactive: bool) -> None:
    if not interactive:
        print_note(conversation.reply(line))
        return
    try:
        print_note(conversation.reply(line))
    except KeyboardInterrupt:
        print()
        print_note("stopped; this turn is not kept")
    except LopaError as error:  # the conversation may be too long: /reset helps
        print_note(f"error: {one_line(str(error))}")
