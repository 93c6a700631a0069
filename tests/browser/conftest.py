"""A real Chromium, a real server of the built-in model, and pages that may not complain."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from browser_support import SMALL, chromium
from playwright.sync_api import Browser, Page, expect, sync_playwright
from serving_support import Server

expect.set_options(timeout=60_000)  # a busy machine is no fault of the page


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with Server("--dtype", "float32", *SMALL, OMP_NUM_THREADS="2") as server:
        yield server


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    # A container has no sandbox to offer; elsewhere Chromium keeps its own.
    root = hasattr(os, "geteuid") and os.geteuid() == 0
    arguments = ["--no-sandbox"] if root else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=arguments)
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Browser, server: Server) -> Iterator[Callable[..., Page]]:
    """Open the playground. What a page says on its console, or throws, fails the test."""
    pages: list[Page] = []
    complaints: list[str] = []

    def open_page(
        address: str = "",
        *,
        url: str | None = None,
        size: tuple[int, int] = (1440, 1000),
        theme: str = "light",
        expected: tuple[str, ...] = (),  # complaints that the test is about
    ) -> Page:
        context = browser.new_context(
            viewport={"width": size[0], "height": size[1]},
            color_scheme=theme,  # type: ignore[arg-type]
            accept_downloads=True,
        )
        page = context.new_page()
        page.set_default_timeout(60_000)

        def complain(text: str) -> None:
            if not any(part in text for part in expected):
                complaints.append(text)

        page.on("console", lambda m: m.type in ("error", "warning") and complain(m.text))
        page.on("pageerror", lambda error: complain(str(error)))
        page.on(
            "request",
            lambda r: (
                r.url.startswith((url or server.url, "blob:"))
                or complain(f"a request elsewhere: {r.url}")
            ),
        )
        page.goto((url or server.url) + "/" + address)
        page.wait_for_selector("html[data-ready]")
        pages.append(page)
        return page

    yield open_page
    for page in pages:
        page.context.close()
    assert complaints == []


@pytest.fixture(scope="session")
def pictures(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where screenshots go: the folder that was asked for, else one that is thrown away."""
    asked = request.config.getoption("--screenshots")
    folder = Path(asked) if asked else tmp_path_factory.mktemp("pictures")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "browser" in Path(item.fspath).parts:
            item.add_marker(pytest.mark.browser)


def pytest_configure(config: pytest.Config) -> None:
    if shutil.which("chromium") is None and not os.environ.get("CHROMIUM"):
        for name in ("chromium-browser", "google-chrome", "google-chrome-stable"):
            if shutil.which(name):
                return
        raise pytest.UsageError(
            "no Chromium found: install it (apt-get install chromium), or name it in CHROMIUM"
        )
