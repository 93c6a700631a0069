"""A server that goes away, and one that asks for a key."""

from __future__ import annotations

import re
from collections.abc import Callable

from browser_support import PROMPT, SMALL, field, filled
from playwright.sync_api import Page, expect
from serving_support import Server

OpenPage = Callable[..., Page]

# What a browser itself writes about a connection that is refused or cut.
CUT = ("net::ERR_", "Failed to load resource")


def test_server_stopped_in_mid_run(open_page: OpenPage) -> None:
    settings = ("--dtype", "float32", *SMALL)
    first = Server(*settings)
    port = first.url.rsplit(":", 1)[1]
    page = open_page("#generate?decoder=vanilla&max_new_tokens=64", url=first.url, expected=CUT)
    field(page, "Prompt").fill(PROMPT)
    page.get_by_role("button", name="Run", exact=True).click()
    expect(page.locator("#round-label")).to_have_text(re.compile(r"round [2-9]"))
    first.process.kill()
    first.stop()
    alert = page.get_by_role("alert").first
    expect(alert).to_contain_text("broke off in the middle of the run")
    expect(alert).to_contain_text("are kept")
    assert filled(page).count() > 0  # and can still be looked at
    page.locator("#step-back").click()

    with Server("--port", port, *settings):
        expect(alert).to_contain_text("The server is back", timeout=60_000)
        field(page, "decoder").select_option("lopa")
        field(page, "max_new_tokens").fill("16")
        page.get_by_role("button", name="Run again").click()
        expect(page.locator("#status")).to_contain_text("Finished")
        expect(alert).to_be_hidden()


def test_api_key(open_page: OpenPage) -> None:
    with Server("--model", "dummy:dream-tiny", "--api-key", "secret", *SMALL) as server:
        page = open_page("#generate?max_new_tokens=16", url=server.url, expected=("401",))
        field(page, "Prompt").fill("Hello")
        page.get_by_role("button", name="Run", exact=True).click()
        expect(page.get_by_role("alert").first).to_contain_text("needs an API key")
        expect(page.get_by_label("API key")).to_be_focused()
        page.keyboard.type("secret")
        page.get_by_role("button", name="Run again").click()
        expect(page.locator("#status")).to_contain_text("Finished")
        assert "secret" not in page.url
        assert page.evaluate("Object.values(localStorage).join()") == ""
