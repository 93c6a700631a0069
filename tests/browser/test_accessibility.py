"""An audit by axe-core of every view, and that nothing is wider than the screen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import axe_playwright_python
import pytest
from browser_support import PROMPT, field
from playwright.sync_api import Page, expect
from synthetic import large_trace

OpenPage = Callable[..., Page]

AXE = (Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text()


def audit(page: Page) -> list[str]:
    """Findings of weight, one line each."""
    # An animation under way is a colour that nobody sees for long.
    page.wait_for_timeout(200)
    page.evaluate(AXE)
    found = page.evaluate("axe.run(document, { resultTypes: ['violations'] })")
    return [
        f"{v['impact']}: {v['id']}: {node['html'][:160]} {node['failureSummary'][:200]}"
        for v in found["violations"]
        if v["impact"] in ("serious", "critical", "moderate")
        for node in v["nodes"]
    ]


@pytest.mark.parametrize(("theme", "size"), [("light", (1440, 1000)), ("dark", (360, 740))])
def test_audit(open_page: OpenPage, tmp_path: Path, theme: str, size: tuple[int, int]) -> None:
    large_trace(tmp_path / "large.jsonl", tokens=128, branches=5)
    page = open_page(theme=theme, size=size)
    assert audit(page) == []  # the welcome
    page.locator("#file").set_input_files(tmp_path / "large.jsonl")
    expect(page.locator("#status")).to_contain_text("Finished")
    page.locator("#scrubber").fill("15")
    page.evaluate("document.querySelectorAll('details').forEach((d) => (d.open = true))")
    assert audit(page) == []
    page.locator("#colour").select_option("round")
    page.locator("#grid .cell").first.hover()
    assert audit(page) == []
    page.get_by_role("tab", name="Race").click()
    assert audit(page) == []
    page.get_by_role("tab", name="Engine").click()
    expect(page.locator("#engine-ranks")).to_have_text("1")
    assert audit(page) == []


def test_nothing_is_wider_than_the_screen(open_page: OpenPage, tmp_path: Path) -> None:
    large_trace(tmp_path / "large.jsonl", tokens=128, branches=5)
    page = open_page()
    page.locator("#file").set_input_files(tmp_path / "large.jsonl")
    expect(page.locator("#status")).to_contain_text("Finished")
    for view in ("Generate", "Race", "Engine"):
        page.get_by_role("tab", name=view).click()
        for width in (360, 412, 640, 768, 1024, 1280, 1920, 2560):
            page.set_viewport_size({"width": width, "height": 900})
            assert page.evaluate("document.documentElement.scrollWidth") <= width, (view, width)


def test_keyboard_alone(open_page: OpenPage) -> None:
    page = open_page("#generate?max_new_tokens=16&branches=1")
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the page")).to_be_focused()
    page.keyboard.press("Tab")
    expect(page.get_by_role("tab", name="Generate")).to_be_focused()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#view-race")).to_be_visible()
    page.keyboard.press("ArrowLeft")
    for _ in range(2):  # past the theme
        page.keyboard.press("Tab")
    expect(field(page, "Prompt")).to_be_focused()
    page.keyboard.press("Control+A")
    page.keyboard.type(PROMPT[:40])
    page.keyboard.press("Control+Enter")
    expect(page.locator("#status")).to_contain_text("Finished")
    page.get_by_role("heading", name="Tokens").click()  # out of the fields
    page.keyboard.press("Home")
    expect(page.locator("#count-rounds")).to_have_text("0")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#count-rounds")).to_have_text("1")
    page.keyboard.press("Space")
    expect(page.locator("#count-rounds")).not_to_have_text("1")
    live = page.locator("#answer")
    assert live.get_attribute("role") == "log"
