"""Pictures of every view, light and dark, desktop and phone; `make screenshots` keeps them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from browser_support import PROMPT
from playwright.sync_api import Page, expect

from lopa import LLM, DecodeConfig, trace
from lopa.evaluation.tasks import generate

OpenPage = Callable[..., Page]

SIZES = {"desktop": (1280, 900), "phone": (390, 844)}
LANES = "&lane=decoder%3Dd2f&lane=decoder%3Dlopa%26branches%3D3"


@pytest.fixture(scope="session")
def answer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with something to see: a word problem at the published number of branches."""
    prompt = generate("words", 3, "eval").prompt
    output = LLM("tiny", dtype="float32").generate(prompt, DecodeConfig(max_new_tokens=64))
    path = tmp_path_factory.mktemp("answer") / "run.jsonl"
    trace.write(output.trace, path)
    return path


def shoot(page: Page, pictures: Path, name: str) -> None:
    page.mouse.move(0, 0)
    path = pictures / f"{name}.png"
    page.screenshot(path=path, animations="disabled")
    assert path.stat().st_size > 10_000


@pytest.mark.parametrize("size", SIZES)
def test_views(open_page: OpenPage, pictures: Path, answer: Path, size: str) -> None:
    page = open_page(size=SIZES[size])
    both = ("light", "dark")

    def shoot_both(view: str, at: str | None = None) -> None:
        for theme in both:
            page.get_by_label("Theme").select_option(theme)
            if at:
                page.locator(at).evaluate("(e) => scrollTo(0, e.offsetTop - 12)")
            shoot(page, pictures, f"{view}-{size}-{theme}")

    shoot_both("welcome")
    page.locator("#file").set_input_files(answer)
    expect(page.locator("#status")).to_contain_text("Finished")
    page.locator("#scrubber").fill("5")
    shoot_both("generate", "#stage" if size == "phone" else None)
    if size == "phone":
        shoot_both("branches", "#branches-title")

    page.evaluate(f"location.hash = {f'race?tokens=64&prompt={PROMPT}{LANES}'!r}")
    expect(page.locator(".lane-card")).to_have_count(2)
    page.get_by_role("button", name="Start").click()
    page.wait_for_selector("#view-race[data-state=done]")
    page.locator("#race-scrubber").fill("4")
    shoot_both("race", "#race-track" if size == "phone" else None)

    page.get_by_role("tab", name="Engine").click()
    expect(page.locator("#engine-wins tr").first).to_be_visible()
    shoot_both("engine", "#view-engine" if size == "phone" else None)
