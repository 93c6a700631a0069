"""Frame time while 512 tokens and 15 branches animate.

A frame takes what the page costs and what the machine does beside it, so the best of a few tries
counts. The page's own time on the processor is held to the limit everywhere; the time on the clock
where the processors have nothing else to do.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect
from synthetic import large_trace

OpenPage = Callable[..., Page]

LIMIT, SHARE, TRIES = 32.0, 0.95, 3
QUIET = 0.8  # share of idle processors beside the page, while it stands still
FRAMES = """async () => {
  const play = document.querySelector("#play");
  document.querySelector("#to-first").click();
  await new Promise(requestAnimationFrame);
  play.click();
  const frames = [];
  let last = await new Promise(requestAnimationFrame);
  while (play.dataset.playing) {
    const now = await new Promise(requestAnimationFrame);
    frames.push(now - last);
    last = now;
  }
  return frames;
}"""


def share_in_time(frames: list[float]) -> float:
    return sum(frame < LIMIT for frame in frames) / len(frames)


@pytest.mark.parametrize("size", [(1440, 1000), (360, 740)])
def test_frames(
    open_page: OpenPage, browser: Browser, tmp_path: Path, size: tuple[int, int]
) -> None:
    made = large_trace(tmp_path / "large.jsonl")
    assert max(len(record.branches) for record in made.rounds) == 16
    assert len(made.token_ids) == 512
    page = open_page(size=size)
    page.locator("#file").set_input_files(tmp_path / "large.jsonl")
    expect(page.locator("#count-rounds")).to_have_text(str(len(made.rounds)))
    page.locator("#speed").select_option("10")
    idle, best = [idle_share()], 0.0
    for _ in range(TRIES):
        best = max(best, share_in_time(page.evaluate(FRAMES)))
        idle.append(idle_share())
        if best >= SHARE:
            break
    free = max(map(min, pairwise(idle)))  # before a try as well as behind it
    own = page_time(browser, page, tmp_path / "trace.json")
    print(
        f"\n{size[0]} px: {best:.1%} of frames under {LIMIT:.0f} ms; the page's own time in "
        f"{SHARE:.0%} of frames up to {quantile(own, SHARE):.1f} ms; "
        f"processors idle beside it: {free:.0%}"
    )
    assert quantile(own, SHARE) < LIMIT
    assert best >= SHARE or free < QUIET


def idle_share(seconds: float = 1.0) -> float:
    """How much of the processors nobody uses; all of it where that cannot be known."""

    def read() -> tuple[int, int]:
        times = [int(n) for n in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
        return times[3], sum(times)

    if not Path("/proc/stat").exists():
        return 1.0
    idle, total = read()
    time.sleep(seconds)
    idle_now, total_now = read()
    return (idle_now - idle) / max(total_now - total, 1)


def page_time(browser: Browser, page: Page, path: Path) -> list[float]:
    """Milliseconds of the page's main thread on the processor, frame by frame."""
    browser.start_tracing(page=page, path=path, categories=["devtools.timeline", "toplevel"])
    page.evaluate(FRAMES)
    browser.stop_tracing()
    events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    mains = {
        (e["pid"], e["tid"])
        for e in events
        if e.get("name") == "thread_name" and e["args"]["name"] == "CrRendererMain"
    }
    tasks = [
        e["tdur"] / 1000
        for e in events
        if e.get("name") == "ThreadControllerImpl::RunTask"
        and (e["pid"], e["tid"]) in mains
        and "tdur" in e
    ]
    frames = [t for t in tasks if t > 0.5]  # what is smaller draws nothing
    assert len(frames) > 20
    return frames


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]
