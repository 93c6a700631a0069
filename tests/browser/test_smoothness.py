"""What the page does in a frame while 512 tokens and 15 branches animate.

How long a frame takes depends on the machine and on what else runs there. So the work is counted:
changes of the document, and in Chromium's own trace the elements styled and the objects laid out.
Times are printed (pytest -s).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect
from synthetic import large_trace

OpenPage = Callable[..., Page]

LIMIT = 32.0  # ms a frame may take to look smooth: the share of such frames is printed
# By round: changes of the document, elements styled, objects laid out. All 512 cells would be over.
MOST = {"changes": 300, "elements": 60, "objects": 450}
FRAMES = """async () => {
  const play = document.querySelector("#play");
  document.querySelector("#to-first").click();
  await new Promise(requestAnimationFrame);
  let changes = 0;
  const observer = new MutationObserver((records) => { changes += records.length; });
  const what = { attributes: true, characterData: true, childList: true, subtree: true };
  observer.observe(document, what);
  play.click();
  const frames = [];
  let last = await new Promise(requestAnimationFrame);
  while (play.dataset.playing) {
    const now = await new Promise(requestAnimationFrame);
    frames.push(now - last);
    last = now;
  }
  changes += observer.takeRecords().length;
  observer.disconnect();
  return { frames, changes };
}"""


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
    played, events = play(browser, page, tmp_path / "trace.json")
    layouts = [e["args"]["beginData"] for e in events if e["name"] == "Layout"]
    work = {
        "changes": played["changes"],
        "elements": sum(
            e["args"]["elementCount"] for e in events if e["name"] == "UpdateLayoutTree"
        ),
        "objects": sum(layout["dirtyObjects"] for layout in layouts),
    }
    by_round = {name: count / len(made.rounds) for name, count in work.items()}
    frames = played["frames"]
    in_time = sum(frame < LIMIT for frame in frames) / len(frames)
    print(f"\n{size[0]} px: {in_time:.1%} of frames under {LIMIT:.0f} ms; by round", by_round)
    # A machine that drops frames shows several rounds in one: that is less work, never more.
    for name, most in MOST.items():
        assert 0 < by_round[name] < most, name
    fired = sum(e["name"] == "FireAnimationFrame" for e in events)
    assert len(layouts) <= fired  # no layout is forced within a frame


def play(browser: Browser, page: Page, path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What the page counted while it played the run, and the events of Chromium's trace."""
    browser.start_tracing(page=page, path=path, categories=["devtools.timeline"])
    played = page.evaluate(FRAMES)
    browser.stop_tracing()
    return played, json.loads(path.read_text())["traceEvents"]
