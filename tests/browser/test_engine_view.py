"""The engine view shows what the server says of itself."""

from __future__ import annotations

from collections.abc import Callable

from browser_support import PROMPT, field
from playwright.sync_api import Page, expect
from serving_support import Server

OpenPage = Callable[..., Page]


def test_a_run_is_seen(open_page: OpenPage, server: Server) -> None:
    runner = open_page("#generate?decoder=vanilla&max_new_tokens=64")
    field(runner, "Prompt").fill(PROMPT)
    runner.get_by_role("button", name="Run", exact=True).click()
    expect(runner.locator("#round-label")).to_contain_text("live")
    page = open_page("#engine")
    expect(page.locator("#engine-slots tbody tr")).to_have_count(1)
    expect(page.locator("#engine-slots")).to_contain_text("running")
    expect(page.locator("#engine-running")).to_have_text("1")
    runner.get_by_role("button", name="Stop").click()
    expect(page.locator("#engine-slots-empty")).to_be_visible()

    server.complete(PROMPT, max_tokens=16, branches=2)
    expect(page.locator("#engine-tpf")).not_to_have_text("–")
    expect(page.locator("#engine-tokens")).to_have_text(
        str(int(server.metric("lopa_tokens_committed_total")))
    )
    for table in ("round-times", "forward-tokens", "wins"):
        expect(page.locator(f"#engine-{table} tr").first).to_be_visible()
    expect(page.locator("#engine-ranks")).to_have_text("1")
