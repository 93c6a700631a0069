"""The modules that read: events in any chunks, metrics, tokens made visible."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect
from synthetic import large_trace

from lopa import trace
from lopa.types import BlockView, Branch, Fill, Lookahead, Opinion, Round, Trace

OpenPage = Callable[..., Page]


def test_events_in_any_chunks(open_page: OpenPage) -> None:
    found = open_page().evaluate(
        """async () => {
          const { EventReader } = await import("/playground/api.js");
          const text = 'data: {"a": 1}\\r\\n\\r\\n: still here\\n\\n' +
            "data: x\\ndata: y\\n\\ndata: [DONE]\\n\\n";
          const answers = new Set();
          for (let size = 1; size <= text.length; size++) {
            const reader = new EventReader();
            const events = [];
            for (let i = 0; i < text.length; i += size) {
              events.push(...reader.push(text.slice(i, i + size)));
            }
            answers.add(JSON.stringify(events));
          }
          return [...answers];
        }"""
    )
    assert [json.loads(answer) for answer in found] == [['{"a": 1}', "x\ny", "[DONE]"]]


def test_metrics_and_visible_text(open_page: OpenPage) -> None:
    found = open_page().evaluate(
        """async () => {
          const { parseMetrics } = await import("/playground/engine.js");
          const { visible } = await import("/playground/dom.js");
          const text = '# HELP a b\\na_total 3.0\\nb{le="+Inf",x="q\\\\"}"} 4e2\\n';
          const tokens = ["\\n", "  ", "\\u202eabc", "a\\u0000"];
          return [Object.fromEntries(parseMetrics(text)), tokens.map(visible)];
        }"""
    )
    assert found == [
        {
            "a_total": [{"labels": {}, "value": 3}],
            "b": [{"labels": {"le": "+Inf", "x": 'q"}'}, "value": 400}],
        },
        ["↵", "␣␣", "\\u202eabc", "a␀"],
    ]


@pytest.mark.parametrize("accept", ["score", "agreed", "exact"])
def test_landscapes_stand_where_the_masks_are(
    open_page: OpenPage, tmp_path: Path, accept: str
) -> None:
    made = large_trace(tmp_path / "large.jsonl", tokens=128, accept=accept)
    if accept == "exact":
        assert any(len(b.lookaheads) > 1 for record in made.rounds for b in record.branches)
    counts = open_page().evaluate(
        """async (text) => {
          const { readTrace, landscape } = await import("/playground/trace.js");
          const run = readTrace(text);
          return run.rounds.map((record, i) => {
            const { places } = run.masksBefore(i + 1);
            return record.branches.map((branch) => [
              landscape(branch).length,
              places.filter(
                (p) => p < branch.end && !branch.lookaheads.some((a) => a.position === p),
              ).length,
            ]);
          });
        }""",
        (tmp_path / "large.jsonl").read_text(),
    )
    assert counts == [[[b.masks, b.masks] for b in record.branches] for record in made.rounds]


def refusing_trace() -> Trace:
    """Two rounds of one block of eight: tokens 1, 2, … are ‘a’, ‘b’, …"""
    ahead = [Lookahead(2 + p, 1 + p, -0.5, 0.6 - p / 10) for p in range(5)]
    drafts = [ahead[:1], ahead[1:2], ahead[:4]]
    other, same = Opinion(9, 0.7), [Opinion(a.token, 0.5) for a in ahead]
    block = BlockView(2, 10, "active", 8)
    first = Round(1, 0, 0, 2, [Branch([], 0.0, 8, 10, False)], 0, [], drafts, [block])
    branches = [
        Branch(drafts[0], 3.0, 7, 10, False, [other], "anchor predicts another token", "80" * 7),
        Branch(drafts[1], 1.0, 7, 10, False, same[1:2], "", "80" * 7),
        Branch(drafts[2], 2.0, 4, 10, False, same[:4], "", "80" * 4),
        Branch([], 0.0, 8, 10, False, [], "", "80" * 8),
    ]
    fills = [Fill(6 + p, 5 + p, 0.95, "threshold") for p in range(4)]
    second = Round(2, 2, 2, 0, branches, 2, fills, [], [block])
    pieces = {token: "-abcdefghi"[token] for token in range(10)}
    return Trace([0, 0], {"accept": "agreed"}, [first, second], list(range(1, 9)), "length", pieces)


def test_several_lookaheads_and_a_refusal(open_page: OpenPage, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    made = refusing_trace()
    trace.write(made, path)
    assert trace.read(path) == made
    page = open_page()
    page.locator("#file").set_input_files(path)
    expect(page.locator("#status")).to_contain_text("Finished")

    # All tokens of the winner are its own, and the others of the round are fills.
    kinds = page.locator("#grid .cell.filled")
    expect(kinds).to_have_text(list("abcdefgh"), use_inner_text=True)
    expect(page.locator("#grid .cell.lookahead")).to_have_text(list("abcd"), use_inner_text=True)

    lanes = page.locator("#lanes .lane:visible:not(.heads)")
    texts = [" ".join(text.split()) for text in lanes.locator(".ahead").all_inner_texts()]
    assert texts == [
        "‘a’ at +0 refused: anchor predicts another token",
        "‘b’ at +1",
        "‘a’ ‘b’ +2 more from +0 won",
        "anchor",
    ]
    assert lanes.locator(".prob").all_inner_texts() == ["60.0 %", "50.0 %", "≥ 30.0 %", ""]
    assert lanes.locator(".anchor .box").all_text_contents() == ["‘i’", "50.0 %", "≥ 50.0 %", ""]
    assert page.locator("#lanes .anchor .other").count() == 1
    assert [c.split()[-1] for c in lanes.evaluate_all("(all) => all.map((e) => e.className)")] == [
        *("refused", "lane", "won", "lane")
    ]
    expect(page.locator("#story")).to_have_text(
        "3 lookaheads and the anchor in one forward, 1 refused. Lookahead 3, ‘a’ ‘b’ +2 more "
        "(at least 30.0 %), won: score 2.00, anchor 0.00; 4 tokens filled."
    )
    # The strip shows where all of its tokens are, and pointing at the lane the grid does.
    marks = lanes.locator("canvas").evaluate_all(
        """async (all) => {
          const { landscapeColours } = await import("/playground/colour.js");
          const { ahead } = landscapeColours();
          return all.map((canvas) => {
            const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, 1);
            const pixels = [...new Int32Array(data.buffer)];
            return pixels.flatMap((pixel, index) => (pixel === ahead ? [index] : []));
          });
        }"""
    )
    assert marks == [[0], [1], [0, 1, 2, 3], []]
    lanes.nth(2).hover()
    expect(page.locator("#grid .cell.pointed")).to_have_text(list("abcd"), use_inner_text=True)

    # Before that round its masks show the drafts, each position once.
    page.locator("#step-back").click()
    expect(page.locator("#grid .cell.candidate")).to_have_text(list("abcd"), use_inner_text=True)
    page.locator("#grid .cell.candidate").first.hover()
    expect(page.get_by_role("tooltip")).to_contain_text("2 of 3")


def test_the_grid_marks_the_drafts_that_are_tried(open_page: OpenPage, tmp_path: Path) -> None:
    """With branches auto more are spawned than the next round tries."""
    made = refusing_trace()
    spare = Lookahead(7, 5, 0.1, 0.2)
    made.rounds[0].spawned.append([spare])
    trace.write(made, tmp_path / "auto.jsonl")
    page = open_page()
    page.locator("#file").set_input_files(tmp_path / "auto.jsonl")
    expect(page.locator("#status")).to_contain_text("Finished")
    page.locator("#step-back").click()
    expect(page.locator("#grid .cell.candidate")).to_have_text(list("abcd"), use_inner_text=True)


def test_the_story_of_exact(open_page: OpenPage, tmp_path: Path) -> None:
    made = refusing_trace()
    made.settings = {"accept": "exact"}
    anchor_alone = refusing_trace().rounds[1]
    anchor_alone.winner, anchor_alone.fills = 3, [Fill(2, 1, 0.95, "threshold")]
    for branch in anchor_alone.branches[:-1]:
        branch.refused = "not what the anchor fills"
    trace.write(made, tmp_path / "exact.jsonl")
    stories = open_page().evaluate(
        """async ([text, round]) => {
          const { readTrace } = await import("/playground/trace.js");
          const { story } = await import("/playground/branches.js");
          const run = readTrace(text);
          const told = story(run, 2);
          run.rounds[1] = round;
          return [told, story(run, 2)];
        }""",
        [(tmp_path / "exact.jsonl").read_text(), asdict(anchor_alone)],
    )
    assert stories == [
        "3 lookaheads and the anchor in one forward, 1 refused. Lookahead 3, ‘a’ ‘b’ +2 more "
        "(at least 30.0 %), was confirmed by the anchor; 4 tokens filled.",
        "3 lookaheads and the anchor in one forward, all refused. No lookahead was confirmed by "
        "the anchor: 1 token filled.",
    ]


def test_merged_fills_are_of_their_own_kind(open_page: OpenPage, tmp_path: Path) -> None:
    made = refusing_trace()
    fills = made.rounds[1].fills
    for number, kind in ((0, "merged"), (1, "merged"), (2, "forced")):
        fills[number].kind = kind
    trace.write(made, tmp_path / "run.jsonl")
    page = open_page()
    page.locator("#file").set_input_files(tmp_path / "run.jsonl")
    expect(page.locator("#status")).to_contain_text("Finished")
    expect(page.locator("#grid .cell.merged")).to_have_text(list("ef"), use_inner_text=True)
    expect(page.locator("#story")).to_contain_text("; 4 tokens filled (2 merged, 1 forced).")
    page.locator("#grid .cell.merged").first.hover()
    expect(page.get_by_role("tooltip")).to_contain_text("merged: other branches agree")
    edges = page.locator(".legend .cell.key").evaluate_all(
        "(all) => all.map((e) => getComputedStyle(e).boxShadow)"
    )
    own = [edge for edge in edges if edge != "none"]
    assert len(own) == len(set(own)) == 3


@pytest.mark.parametrize("broken", ["lookaheads", "anchor"])
def test_a_branch_without_its_lists_is_refused(
    open_page: OpenPage, tmp_path: Path, broken: str
) -> None:
    trace.write(refusing_trace(), tmp_path / "run.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    del lines[2]["branches"][0][broken]
    message = open_page().evaluate(
        """async (text) => {
          const { readTrace } = await import("/playground/trace.js");
          try { readTrace(text); } catch (error) { return error.message; }
        }""",
        "\n".join(map(json.dumps, lines)),
    )
    assert message == f"{broken} is missing"


def test_an_edited_token_is_what_it_was_before(open_page: OpenPage, tmp_path: Path) -> None:
    """A round shows the tokens of its time, although a later one replaces them."""
    made = refusing_trace()
    anchor, done = Branch([], 1.0, 0, 10, False), BlockView(2, 10, "active", 0)
    edits = [Fill(2, 9, 0.9, "edited"), Fill(9, 1, 0.8, "edited")]
    made.rounds.append(Round(3, 2, 2, 0, [anchor], 0, edits, [], [done]))
    made.token_ids = [9, *range(2, 8), 1]
    trace.write(made, tmp_path / "run.jsonl")
    page = open_page()
    page.locator("#file").set_input_files(tmp_path / "run.jsonl")
    expect(page.locator("#status")).to_contain_text("Finished")
    cells = page.locator("#grid .cell.filled")
    expect(cells).to_have_text(list("ibcdefga"), use_inner_text=True)
    expect(page.locator("#grid .cell.edited")).to_have_text(list("ia"), use_inner_text=True)
    expect(page.locator("#story")).to_contain_text("no token filled, 2 edited")
    page.locator("#grid .cell.edited").first.hover()
    expect(page.get_by_role("tooltip")).to_contain_text("edited: replaces a token")
    expect(page.get_by_role("tooltip")).to_contain_text("‘a’")
    page.locator("#step-back").click()
    expect(cells).to_have_text(list("abcdefgh"), use_inner_text=True)
    assert page.locator("#grid .cell.edited").count() == 0
    page.locator("#step-back").click()
    assert cells.count() == 0
