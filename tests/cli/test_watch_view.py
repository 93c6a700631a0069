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
from lopa.types import Branch, Fill, Lookahead, Opinion, Round

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
        "branches": [Branch([], -1.0, 4, 7, False)],
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
    branches = [Branch([ahead], -0.5, 2, 7, False), Branch([], -1.0, 3, 7, False)]
    fills = [Fill(PROMPT, 1, 0.99, "threshold")]
    spawned = [[Lookahead(PROMPT + 3, 1, -0.5, 0.6)]]
    view.update(event([1, 2, MASK_ID, MASK_ID], fills, branches=branches, spawned=spawned))
    found = styles(view.text())
    assert found["one"].color == confidence_style(0.99).color
    assert found["[red]two"].underline
    assert found["[red]two"].color.name == "cyan"
    masks = [span.style for span in view.text().spans[-2:]]
    assert masks[0].dim
    assert masks[1].color.name == "cyan"  # the next round looks ahead here


def test_edited_tokens_are_of_their_own_kind() -> None:
    """Also one that replaces the token which was placed ahead, in the round that it wins."""
    view = output_view()
    view.update(event([1, MASK_ID], [Fill(PROMPT, 1, 0.99, "threshold")]))
    ahead = Lookahead(PROMPT + 1, 1, -0.5, 0.6)
    branches = [Branch([ahead], -0.5, 0, 7, False), Branch([], -1.0, 1, 7, False)]
    fills = [Fill(PROMPT, 3, 0.9, "edited"), Fill(PROMPT + 1, 2, 0.95, "edited")]
    view.update(event([3, 2], fills, branches=branches))
    found = styles(view.text())
    for piece in ("three↵\n", "[red]two"):
        assert found[piece].underline
        assert found[piece].color.name == "yellow"


def test_merged_fills_are_of_their_own_kind() -> None:
    view = output_view()
    fills = [Fill(PROMPT, 1, 0.99, "threshold"), Fill(PROMPT + 1, 2, 0.4, "merged")]
    view.update(event([1, 2, MASK_ID], fills))
    found = styles(view.text())
    assert found["one"].color == confidence_style(0.99).color
    assert (found["[red]two"].color.name, found["[red]two"].underline) == ("magenta", True)


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
    assert "merged" in text  # in the legend
    assert "▸" in text
    assert f"round {rounds} " in text


@pytest.fixture
def judged(started: tuple[Session, Iterator[Event]]) -> tuple[Session, Event]:
    """A round of branches that the anchor agrees with, or not: of one token, and of several."""
    session, _ = started
    start = session.decoder.prompt
    first, second, third = (Lookahead(start + p, 40 + p, -0.5, 0.6 + p / 10) for p in range(3))
    same = [Opinion(a.token, 0.9 - i / 10) for i, a in enumerate((first, second, third))]
    other = Opinion(50, 0.8)
    branches = [
        Branch([first], 1.0, 7, start + 8, False, [other], "anchor predicts another token"),
        Branch([second], 2.0, 7, start + 8, False, same[1:2]),
        Branch([first, second, third], 1.5, 5, start + 8, False, same),
        Branch([third, second], 0.5, 6, start + 8, False, [other, other], "anchor at most 0.1"),
        Branch([], 0.0, 8, start + 8, False),
    ]
    record = Round(4, 0, 0, 0, branches, 1, [Fill(start, 5, 0.95, "threshold")], [], [])
    return session, Event(record, "", [5] + [session.decoder.mask_id] * 7)


def shown(session: Session, happened: Event, width: int = 100) -> list[str]:
    console = Console(file=io.StringIO(), force_terminal=True, width=width, height=24, record=True)
    view = Watch(session, console)
    view._rows = len(happened.round.branches)  # as with so many branches
    view._round = happened.round
    view._view.update(happened)
    console.print(view)
    return console.export_text().splitlines()


def test_branches_with_what_the_anchor_thinks(judged: tuple[Session, Event]) -> None:
    session, happened = judged
    lines = shown(session, happened)
    head = next(number for number, line in enumerate(lines) if "lookahead " in line[:30])
    assert lines[head].split() == ["place", "lookahead", "p", "anchor", "score"]
    name = {token: OutputView.of(session).name(token) for token in (40, 41, 42, 50)}
    refused, won, several, two, anchor, counters = (line.rstrip() for line in lines[head + 1 :][:6])
    assert refused.split()[:5] == ["+0", name[40], "0.60", name[50], "1.000"]
    assert refused.endswith("  anchor predicts another token")
    assert won.split()[:6] == ["▸", "+1", name[41], "0.70", "0.80", "2.000"]
    # Of several tokens the first two, and the least probability of all.
    assert several.split()[:7] == ["+0", name[40], name[41], "+1", "≥0.60", "≥0.70", "1.500"]
    assert two.split()[:3] == ["+2", name[42], name[41]]
    assert f" {name[50]} +1 " in two  # and one more that is another
    assert two.endswith("anchor at most 0.1")
    assert anchor.split()[:2] == ["anchor", "0.000"]
    assert counters.startswith("  round 1 ")
    bars = ["━" in line for line in (refused, won, several, two, anchor)]
    assert bars == [False, True, True, False, True]  # a reason stands in place of the bar


@pytest.mark.parametrize("width", [100, 80, 60, 30])
def test_branches_stay_within_the_width_and_keep_their_height(
    judged: tuple[Session, Event], width: int
) -> None:
    session, happened = judged
    heights = set()
    for branches in (happened.round.branches, happened.round.branches[-1:]):
        ahead = [Lookahead(session.decoder.prompt + 1, 3, -1.0, 0.5)] * 12
        long = Branch(ahead, 123.0, 5, 9, False, [Opinion(3, 0.25)] * 12)
        happened.round.branches, happened.round.winner = [long, *branches], 0
        view = Watch(session, Console(file=io.StringIO(), force_terminal=True, width=width))
        view._rows, view._round = 6, happened.round
        lines = view._console.render_lines(view._branches(width - 2))
        heights.add(len(lines))
    assert heights == {1 + 6}
    assert max(map(len, shown(session, happened, width))) <= width


def test_the_plain_line_counts_what_is_refused_and_merged(judged: tuple[Session, Event]) -> None:
    session, happened = judged
    console = Console(file=io.StringIO(), width=20, record=True)
    Watch(session, console).show(happened)
    text = console.export_text()
    assert ", 1 of 5, 2 refused  1 tokens" in text
    for branch in happened.round.branches:
        branch.refused = ""
    happened.round.fills.append(Fill(session.decoder.prompt + 2, 42, 0.5, "merged"))
    Watch(session, console).show(happened)
    text = console.export_text()
    assert "refused" not in text
    assert ", 1 of 5, 1 merged  1 tokens" in text


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
