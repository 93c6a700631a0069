"""`lopa chat`: turns, commands, interruption."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_support import SHORT, Result, Run

from lopa import LLM, DecodeConfig
from lopa.cli.chat import Conversation
from lopa.engine.scheduler import Scheduler
from lopa.engine.session import Session

NO_TEMPLATE = "no chat template"


def test_lines_from_a_pipe(run: Run, chat_model: Path) -> None:
    short = ("--model", str(chat_model), *SHORT[2:])
    result = run("chat", *short, stdin="hello\n\n/help\n/nosuch\nagain\n/quit\nnever\n")
    assert result.code == 0
    assert result.err.count("lopa auto (") == 2
    assert "/reset" in result.err
    assert "there is no /nosuch" in result.err
    assert NO_TEMPLATE not in result.err


def test_history_is_kept_and_forgotten(chat_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(chat_model)
    conversation = Conversation(llm, DecodeConfig(max_new_tokens=8, block_size=4))
    assert llm.tokenizer is not None
    given: list[list[dict[str, str]]] = []
    chat = llm.tokenizer.chat
    monkeypatch.setattr(llm.tokenizer, "chat", lambda said: given.append(list(said)) or chat(said))
    conversation.reply("hello")
    conversation.reply("again")
    roles = [m["role"] for m in given[1]]
    assert roles == ["user", "assistant", "user"]
    assert [m["content"] for m in given[1] if m["role"] == "user"] == ["hello", "again"]
    conversation.reset()
    conversation.reply("anew")
    assert given[2] == [{"role": "user", "content": "anew"}]


def test_without_a_template_each_line_is_a_prompt(run: Run) -> None:
    result = run("chat", *SHORT, stdin="hello\n")
    assert result.err.count(NO_TEMPLATE) == 1
    assert result.out == run("generate", "hello", *SHORT).out


def test_without_a_tokenizer_lines_are_ids(run: Run, ids_model: Path) -> None:
    result = run("chat", "--model", str(ids_model), *SHORT[2:], stdin="1 2 3\n")
    assert result.out == run("generate", "1 2 3", "--model", str(ids_model), *SHORT[2:]).out


def test_a_pipe_ends_at_the_first_error(run: Run, ids_model: Path) -> None:
    result = run("chat", "--model", str(ids_model), *SHORT[2:], stdin="words\n1 2 3\n")
    assert "token ids" in result.error


class Keyboard:
    """Somebody at a terminal: lines, or keys as exceptions."""

    def __init__(self, *keys: str | type[BaseException]) -> None:
        self._keys: Iterator[str | type[BaseException]] = iter(keys)

    def isatty(self) -> bool:
        return True

    def input(self, prompt: str) -> str:
        key = next(self._keys)
        if isinstance(key, str):
            return key
        raise key


@pytest.fixture
def sit_down(run: Run, monkeypatch: pytest.MonkeyPatch, chat_model: Path) -> Run:
    def sit_down(*keys: str | type[BaseException]) -> Result:
        keyboard = Keyboard(*keys)
        monkeypatch.setattr("builtins.input", keyboard.input)
        return run("chat", "--model", str(chat_model), *SHORT[2:], stdin=keyboard)

    return sit_down


def test_ctrl_d_leaves(sit_down: Run) -> None:
    assert sit_down(EOFError).code == 0


def test_ctrl_c_at_the_prompt_says_how_to_leave(sit_down: Run) -> None:
    result = sit_down(KeyboardInterrupt, EOFError)
    assert result.code == 0
    assert "/quit" in result.err


def test_ctrl_c_stops_the_reply_only(sit_down: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter([False, True])
    step, abort = Scheduler.step, Scheduler.abort
    aborted: list[Session] = []

    def interrupted(self: Scheduler) -> Any:
        if next(calls, False):
            raise KeyboardInterrupt
        return step(self)

    def noted(self: Scheduler, session: Session) -> None:
        aborted.append(session)
        abort(self, session)

    monkeypatch.setattr(Scheduler, "step", interrupted)
    monkeypatch.setattr(Scheduler, "abort", noted)
    result = sit_down("hello", "again", EOFError)
    assert result.code == 0
    assert "stopped" in result.err
    assert result.err.count("lopa auto (") == 1
    assert all(session.slot == -1 for session in aborted)
    assert aborted[0].output is None


def test_a_turn_that_fails_does_not_end_the_talk(sit_down: Run) -> None:
    result = sit_down("x" * 200, "hello", EOFError)
    assert result.code == 0
    assert "error: the prompt has" in result.err
    assert result.err.count("lopa auto (") == 1


def test_the_built_in_model_keeps_no_history(run: Run) -> None:
    """Every line is a question of its own; it says so, and what it can do."""
    short = ("--max-new-tokens", "96", "--branches", "3")
    result = run("chat", *short, stdin="/example\n/example\nHello\n")
    assert result.code == 2
    assert result.out.count("#### 18") == 2
    assert "note: the built-in model solves word problems" in result.err
    assert result.err.count("How many books does she have in the end?\n") == 2
    assert result.err.splitlines()[-1].startswith("error: the built-in model solves word problems")
