"""What the tests in a browser share."""

from __future__ import annotations

import os
import shutil

from playwright.sync_api import Locator, Page, expect

from lopa.tasks import generate

# Few rounds, since the machines that run these tests are small.
SMALL = ("--branches", "3", "--block-size", "16", "--max-new-tokens", "64")
PROMPT = generate("functions", 5, "eval").prompt
HOSTILE = '<img src=x onerror="document.title=1"><script>document.title=1</script><b>bold</b>'
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def chromium() -> str:
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    assert found is not None, "no Chromium: install it, or name it in CHROMIUM"
    return found


def field(page: Page, name: str) -> Locator:
    """A field of the generate view; the contestants of a race have the same."""
    return page.locator("#view-generate").get_by_label(name, exact=True)


def run(page: Page, prompt: str = PROMPT) -> None:
    """Type a prompt, run it and wait for its end."""
    field(page, "Prompt").fill(prompt)
    page.get_by_role("button", name="Run", exact=True).click()
    expect(page.locator("#status")).to_contain_text("Finished", timeout=90_000)


def shown_round(page: Page) -> int:
    return int(page.locator("#scrubber").input_value())


def filled(page: Page) -> Locator:
    return page.locator("#grid .cell.filled")
