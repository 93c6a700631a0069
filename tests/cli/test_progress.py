"""Progress on standard error: a bar on a terminal, elsewhere lines; nothing if soon done."""

from __future__ import annotations

import io
import itertools
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from lopa.cli import model
from lopa.cli import progress as module
from lopa.cli.options import ModelOptions
from lopa.cli.progress import Progress

_PATIENCE = 60.0  # seconds that a busy machine may take


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("BAR_AFTER", 0.0),
        ("LINE_AFTER", 0.0),
        ("LINE_SECONDS", (0.0, 0.0)),
        ("_TICK", 0.001),
    ):
        monkeypatch.setattr(module, name, value)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120)
    monkeypatch.setattr(module, "stderr_console", lambda: console)
    return out


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(module, "print_note", found.append)
    monkeypatch.setattr(module, "stderr_console", lambda: Console(file=io.StringIO()))
    return found


def wait_for(what: Callable[[], object]) -> None:
    until = time.monotonic() + _PATIENCE
    while not what():
        assert time.monotonic() < until
        time.sleep(0.001)


@pytest.mark.usefixtures("soon")
def test_lines_where_there_is_no_terminal(lines: list[str]) -> None:
    with Progress("counting", "sheep") as progress:
        wait_for(lambda: lines)
        assert re.fullmatch(r"counting: \d+ s", lines[-1])
        progress.update(3)
        wait_for(lambda: "3 sheep" in lines[-1])
        progress.update(4, 9)
        wait_for(lambda: "4 of 9" in lines[-1])
        assert re.fullmatch(r"counting: 4 of 9 sheep, \d+ s", lines[-1])
    count = len(lines)
    time.sleep(0.01)
    assert len(lines) == count


def test_what_is_soon_done_shows_nothing(lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LINE_AFTER", 1e6)
    with Progress("counting") as progress:
        progress.update(1, 2)
        time.sleep(0.01)
    assert lines == []


@pytest.mark.usefixtures("soon")
def test_pauses_grow(lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LINE_SECONDS", (5.0, 60.0))
    monkeypatch.setattr(module, "LINE_AFTER", 2.0)
    bar, said = Progress("counting"), []
    bar._since = bar._last_line = 0.0  # whole seconds: sums of others may be rounded
    for second in range(2000):
        count = len(lines)
        bar._show(float(second))
        if len(lines) > count:
            said.append(second)
    pauses = [b - a for a, b in itertools.pairwise(said)]
    assert said[:4] == [2, 7, 12, 17]
    assert pauses == sorted(pauses)
    assert pauses[-1] == 60


@pytest.mark.usefixtures("soon")
def test_nothing_before_the_first_update_nor_once_all_is_done(lines: list[str]) -> None:
    with Progress() as progress:
        time.sleep(0.01)
        assert lines == []
        progress.update(1, 2, title="loading")
        wait_for(lambda: lines)
        progress.update(2, 2, title="loading")
        time.sleep(0.01)
        assert all("1 of 2" in line for line in lines)
        progress.update(0, 7, title="compiling", unit="kernels")  # time is counted anew
        wait_for(lambda: lines[-1] == "compiling: 0 of 7 kernels, 0 s")


@pytest.mark.usefixtures("soon")
def test_a_bar_on_a_terminal(terminal: io.StringIO) -> None:
    with Progress("counting", "sheep") as progress:
        progress.update(3, 9)
        wait_for(lambda: "3 of 9 sheep" in terminal.getvalue())
    assert "counting" in terminal.getvalue()
    assert terminal.getvalue().endswith("\x1b[2K")  # it is removed


def test_a_bar_waits(terminal: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BAR_AFTER", 1e6)
    with Progress("counting") as progress:
        progress.update(3, 9)
        time.sleep(0.01)
    assert terminal.getvalue() == ""


@pytest.mark.usefixtures("soon")
def test_a_long_load_shows_a_bar(ids_model: Path, terminal: io.StringIO) -> None:
    def slow(*arguments: object, progress: Callable[[int, int], None], **more: object) -> None:
        progress(1, 7)
        wait_for(lambda: "1 of 7 tensors" in terminal.getvalue())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lopa.engine.llm.LLM", slow)
        model.load(ModelOptions(model=str(ids_model)))
    assert f"loading {ids_model}"[:20] in terminal.getvalue()
