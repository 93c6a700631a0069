"""Pictures of every view, light and dark, desktop and phone; `make screenshots` keeps them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from urllib.parse import urlencode

import pytest
from browser_support import PROMPT
from playwright.sync_api import Page, expect

from lopa import LLM, DecodeConfig, trace
from lopa.tasks import generate

OpenPage = Callable[..., Page]

SIZES = {"desktop": (1280, 900), "phone": (390, 844)}
LANES = ["decoder=d2f", "branches=3", "branches=7"]

# Tokens that are seen outside of their cells
RUNS_OVER = """[...document.querySelectorAll(".cell > span")]
    .filter((e) => e.scrollWidth > e.clientWidth && getComputedStyle(e).overflowX === "visible")
    .map((e) => e.textContent)"""


@pytest.fixture(scope="session")
def answer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with something to see: a word problem at the published number of branches."""
    prompt = generate("words", 3, "eval").prompt
    output = LLM("tiny", dtype="float32").generate(prompt, DecodeConfig(max_new_tokens=64))
    path = tmp_path_factory.mktemp("answer") / "run.jsonl"
    trace.write(output.trace, path)
    return path


def test_views(open_page: OpenPage, pictures: Path, answer: Path) -> None:
    page = open_page()

    def shoot(view: str, sizes: Iterable[str] = SIZES, part: str | None = None) -> None:
        """In both themes; on a phone, scrolled down to the part that matters."""
        for size in sizes:
            page.set_viewport_size(dict(zip(("width", "height"), SIZES[size], strict=True)))  # type: ignore[arg-type]
            for theme in ("light", "dark"):
                page.get_by_label("Theme").select_option(theme)
                page.mouse.move(0, 0)
                page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
                if part and size == "phone":
                    page.locator(part).evaluate(
                        "(e) => scrollTo(0, e.getBoundingClientRect().top + scrollY - 12)"
                    )
                path = pictures / f"{view}-{size}-{theme}.png"
                page.screenshot(path=path, animations="disabled")
                assert path.stat().st_size > 10_000

    page.locator("#all-settings > summary").click()
    shoot("welcome")
    page.locator("#file").set_input_files(answer)
    expect(page.locator("#status")).to_contain_text("Finished")
    page.locator("#scrubber").fill("6")
    shoot("generate", part="#stage")
    assert page.evaluate(RUNS_OVER) == []
    shoot("branches", ["phone"], part="#branches-title")

    search = urlencode([("tokens", 64), ("prompt", PROMPT), *(("lane", lane) for lane in LANES)])
    page.evaluate("(search) => (location.hash = search)", f"race?{search}")
    expect(page.locator(".lane-card")).to_have_count(len(LANES))
    page.get_by_role("button", name="Start").click()
    page.wait_for_selector("#view-race[data-state=done]")
    page.locator("#race-scrubber").fill("4")
    shoot("race", part="#race-track")

    page.get_by_role("tab", name="Engine").click()
    expect(page.locator("#engine-wins tr").first).to_be_visible()
    shoot("engine", part="#view-engine")
