"""One prompt, several settings, one clock."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

from browser_support import PROMPT
from playwright.sync_api import Page, expect
from serving_support import Server

OpenPage = Callable[..., Page]


def side_by_side(server: Server) -> bool:
    """Whether the last two requests of the page ran at the same time, for the most part."""
    spans = []
    for line in server.logged("request"):
        if line["path"] == "/v1/completions":
            end = datetime.fromisoformat(line["time"]).timestamp()
            spans.append((end - line["seconds"], end))
    (start, end), (other_start, other_end) = spans[-2:]
    shared = min(end, other_end) - max(start, other_start)
    return shared > min(end - start, other_end - other_start) / 2


def test_race(open_page: OpenPage, server: Server) -> None:
    page = open_page()
    page.get_by_role("tab", name="Race").click()
    cards = page.locator(".lane-card")
    expect(cards).to_have_count(4)
    expect(page.get_by_role("button", name="Add a contestant")).to_be_hidden()
    for _ in range(2):
        cards.first.get_by_role("button", name="Remove this contestant").click()
    expect(cards).to_have_count(2)
    cards.first.locator("summary", has_text="Settings").first.click()
    cards.first.get_by_label("decoder", exact=True).select_option("d2f")
    cards.last.locator("summary", has_text="Settings").first.click()
    cards.last.get_by_label("branches", exact=True).fill("3")
    expect(cards.first.locator("h2")).to_contain_text("d2f")
    page.locator("#race-prompt").fill(PROMPT)
    page.locator("#race-tokens").fill("64")
    page.get_by_role("button", name="Start", exact=True).click()
    page.wait_for_selector("#view-race[data-state=done]")

    assert not side_by_side(server)  # each was timed alone

    rows = page.locator("#race-table tbody tr")
    expect(rows).to_have_count(2)
    for row, settings in ((rows.first, {"decoder": "d2f"}), (rows.last, {"branches": 3})):
        answer = server.complete(PROMPT, max_tokens=64, **settings).json()
        assert row.locator(".answer-cell").text_content() == answer["choices"][0]["text"]
        assert row.locator("td").nth(1).text_content() == str(answer["usage"]["completion_tokens"])
    rounds = [int(row.locator("td").first.text_content() or 0) for row in rows.all()]
    expect(page.locator("#race-label")).to_have_text(f"round {max(rounds)} of {max(rounds)}")

    # Compared at the same round, then at the same second.
    page.locator("#race-scrubber").fill("2")
    for card in cards.all():
        expect(card.locator(".lane-counters")).to_contain_text("2 rounds")
    page.locator("#race-by").select_option("time")
    page.locator("#race-scrubber").fill("400")
    for card, count in zip(cards.all(), rounds, strict=True):
        expect(card.locator(".lane-counters")).to_contain_text(f"{count} rounds")
    assert page.locator("#race-chart polyline").count() >= 4

    # All at once, in shared rounds.
    expect(page.locator("#race-shared")).to_be_hidden()
    page.get_by_label("all at once").check()
    page.get_by_role("button", name="Start", exact=True).click()
    page.wait_for_selector("#view-race[data-state=done]")
    expect(page.locator("#race-shared")).to_be_visible()
    assert side_by_side(server)

    # The address brings everything back.
    address = page.evaluate("location.hash")
    other = open_page(address)
    expect(other.locator(".lane-card")).to_have_count(2)
    expect(other.locator("#race-prompt")).to_have_value(PROMPT)
    expect(other.get_by_label("all at once")).to_be_checked()
    assert (
        other.locator(".lane-card h2").all_text_contents()
        == page.locator(".lane-card h2").all_text_contents()
    )
