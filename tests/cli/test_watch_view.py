"""The live view, drawn on a console of a known size."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console

from lopa import LLM, DecodeConfig
from lopa.cli.watch import _MAX_BRANCHES, MASK, OutputView, Watch, confidence_style
from lopa.engine.output import Event
from lopa.engine.session import Session
from lopa.types import Branch, Fill, Lookahead, Round

PROMPT = 3
MASK_ID, EOS = 9, 8
PIECES = {1: " one", 2: " [red]two", 3: "three\n", 4: "\x1b[2J", EOS: "<eos>"}


def output_view(block_size: int | None = 4) -> OutputView:
    return OutputView(
        PIECES.__getitem__, prompt=PROMPT, mask_id=MASK_ID, eos_ids={EOS}, block_size=block_size
    )


def event(tokens: list[int], fills: list[Fill], **changes: Any) -> Event:
    record: dict[str, Any] = {
        "index": 1,
        "start": 0,
        "cached": 0,
        "committed": PROMPT,
        "branches": [Branch(None, -1.0, 4, 7, False)],
        "winner": 0,
        "fills": fills,
        "spawned": [],
        "blocks": [],
        "seconds": 0.5,
    }
    return Event(Round(**{**record, **changes}), "", tokens)


def styles(text: Any) -> dict[str, Any]:
    return {text.plain[span.start : span.end]: span.style for span in text.spans}


def test_tokens_masks_blocks_and_eos() -> None:
    view = output_view()
    view.update(event([1, MASK_ID, 2, MASK_ID, 3, EOS, MASK_ID], []))
    assert view.text().plain == f" one{MASK} [red]two{MASK}│three↵\n∎{MASK}"
    whole = output_view(block_size=None)
    whole.update(event([1] * 8, []))
    assert "│" not in whole.text().plain


def test_control_characters_are_harmless() -> None:
    view = output_view()
    view.update(event([4], []))
    assert view.text().plain == "␛[2J"


def test_fills_are_coloured_by_confidence_and_lookaheads_marked() -> None:
    view = output_view()
    ahead = Lookahead(PROMPT + 1, 2, -0.5, 0.6)
    branches = [Branch(ahead, -0.5, 2, 7, False), Branch(None, -1.0, 3, 7, False)]
    fills = [Fill(PROMPT, 1, 0.99, "threshold")]
    spawned = [Lookahead(PROMPT + 3, 1, -0.5, 0.6)]
    view.update(event([1, 2, MASK_ID, MASK_ID], fills, branches=branches, spawned=spawned))
    found = styles(view.text())
    assert found["one"].color == confidence_style(0.99).color
    assert found["[red]two"].underline
    assert found["[red]two"].color.name == "cyan"
    masks = [span.style for span in view.text().spans[-2:]]
    assert masks[0].dim
    assert masks[1].color.name == "cyan"  # the next round looks ahead here


def test_confidence_runs_from_red_to_green() -> None:
    def colour(max_prob: float) -> Any:
        return confidence_style(max_prob).color.triplet  # type: ignore[union-attr]

    assert colour(0.0) == colour(0.3)
    assert colour(0.0).red > colour(0.0).green
    assert colour(1.0).green > colour(1.0).red


def test_committed_tokens_step_back_until_the_end() -> None:
    view = output_view()
    view.update(event([1, 2], [], cached=PROMPT, committed=1))
    found = styles(view.text())
    assert (found["one"].dim, found["[red]two"].bold) == (True, True)


def test_counters_count_to_eos() -> None:
    view = output_view()
    view.update(event([1, MASK_ID, 2, EOS, EOS, EOS], []))
    view.update(event([1, MASK_ID, 2, EOS, EOS, EOS], []))
    counters = view.counters
    assert (counters.rounds, counters.tokens, counters.tokens_per_second) == (2, 3, 3.0)


def test_only_the_last_lines_are_kept() -> None:
    view = output_view(block_size=None)
    view.update(event([3] * 10 + [1], []))
    lines = view.lines(Console(width=40), 40, 3)
    assert lines.plain.split("\n") == ["three↵", "three↵", " one"]


@pytest.fixture
def started() -> tuple[Session, Iterator[Event]]:
    llm = LLM("dummy:dream-tiny")
    session = llm.session("hello", DecodeConfig(max_new_tokens=8, block_size=4, branches=3))
    return session, llm.engine().stream(session)


@pytest.mark.parametrize("height", [24, 6])
def test_live(started: tuple[Session, Iterator[Event]], height: int) -> None:
    session, events = started
    console = Console(
        file=io.StringIO(), force_terminal=True, width=100, height=height, record=True
    )
    rounds = 0
    with Watch(session, console) as view:
        for happened in events:
            view.show(happened)
            rounds += 1
            console.print(view)
    text = console.export_text()
    assert "anchor" in text
    assert "▸" in text
    assert f"round {rounds} " in text


def test_without_a_terminal_one_line_per_round(started: tuple[Session, Iterator[Event]]) -> None:
    session, events = started
    console = Console(file=io.StringIO(), width=20, record=True)
    rounds = 0
    with Watch(session, console) as view:
        for happened in events:
            view.show(happened)
            rounds += 1
    lines = console.export_text().splitlines()
    assert len(lines) == rounds
    assert all(line.startswith("round ") for line in lines)
    assert "8 tokens" in lines[-1]


def test_more_branches_than_rows() -> None:
    config = DecodeConfig(max_new_tokens=32, block_size=32, branches=20)
    llm = LLM("dummy:dream-tiny")
    session = llm.session("hello", config)
    events = llm.engine().stream(session)
    console = Console(file=io.StringIO(), force_terminal=True, width=100, height=24, record=True)
    with Watch(session, console) as view:
        for _ in range(3):
            happened = next(events)
            view.show(happened)
        assert len(happened.round.branches) > _MAX_BRANCHES
    console.export_text()
    console.print(view)
    lines = console.export_text().splitlines()
    assert len(lines) < 24
    assert sum("▸" in line for line in lines) == 1
