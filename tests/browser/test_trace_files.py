"""Runs as files: saved and opened again, and those of the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from browser_support import filled, run, shown_round
from playwright.sync_api import Page, expect

from lopa import LLM, DecodeConfig, trace

OpenPage = Callable[..., Page]

DROP = """async (text) => {
  const data = new DataTransfer();
  data.items.add(new File([text], "run.jsonl"));
  for (const type of ["dragenter", "dragover", "drop"]) {
    document.body.dispatchEvent(new DragEvent(type, { bubbles: true, dataTransfer: data }));
  }
}"""


def grid(page: Page) -> list[str]:
    texts: list[str] = page.locator("#grid .cell").all_text_contents()
    return texts


def test_round_trip(open_page: OpenPage, tmp_path: Path) -> None:
    page = open_page("#generate?max_new_tokens=32")
    run(page)
    rounds, text, cells = shown_round(page), page.locator("#answer").text_content(), grid(page)
    with page.expect_download() as download:
        page.get_by_role("button", name="Save trace").click()
    path = tmp_path / download.value.suggested_filename
    download.value.save_as(path)

    # The library reads it, and it is what the library would have written but for the text.
    saved = trace.read(path)
    assert len(saved.rounds) == rounds
    assert all(branch.landscape for record in saved.rounds for branch in record.branches[-1:])
    again = [json.loads(line) for line in trace.lines(saved)]
    own = [json.loads(line) for line in path.read_text().splitlines()]
    assert own[1:-1] == again[1:-1]

    other = open_page()
    other.locator("#file").set_input_files(path)
    expect(other.locator("#count-rounds")).to_have_text(str(rounds))
    assert other.locator("#answer").text_content() == text
    assert grid(other) == cells
    other.evaluate(DROP, path.read_text())
    expect(other.locator("#status")).to_contain_text("Finished")


@pytest.mark.parametrize("decoder", ["vanilla", "fast-dllm", "d2f", "lopa"])
def test_files_of_the_command_line(open_page: OpenPage, tmp_path: Path, decoder: str) -> None:
    llm = LLM("dummy:dream-tiny", device="cpu")
    config = DecodeConfig(decoder=decoder, max_new_tokens=32)  # type: ignore[arg-type]
    output = llm.generate("Hello <b>there</b>", config)
    trace.write(output.trace, tmp_path / "run.jsonl")
    page = open_page(size=(360, 740))
    page.evaluate(DROP, (tmp_path / "run.jsonl").read_text())
    expect(page.locator("#count-rounds")).to_have_text(str(output.rounds))
    expect(page.locator("#count-tokens")).to_have_text(str(output.tokens))
    for number, record in enumerate(output.trace.rounds, 1):
        page.locator("#to-first").click() if number == 1 else None
        page.locator("#step-forward").click()
        assert page.locator("#lanes [role=rowgroup] .lane:visible:not(.heads)").count() == len(
            record.branches
        )
        if number == 5:
            break
    page.locator("#to-last").click()
    expect(filled(page)).to_have_count(output.tokens_paper)


@pytest.mark.parametrize(
    "text",
    ["", "not json", '{"type": "run"}', '{"type":"run","version":9,"prompt_ids":[1]}', "[]\n[]"],
)
def test_other_files_are_refused(open_page: OpenPage, text: str) -> None:
    page = open_page()
    page.evaluate(DROP, text)
    expect(page.get_by_role("alert").first).to_contain_text(
        "run.jsonl is not a complete lopa trace"
    )
    expect(page.locator("#welcome")).to_be_visible()


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("branches", "end", 1e15),
        ("branches", "end", None),
        ("branches", "end", [1]),
        ("fills", "position", 1e15),
        ("blocks", "end", 1e15),
    ],
)
def test_numbers_out_of_range(open_page: OpenPage, part: str, name: str, value: object) -> None:
    llm = LLM("dummy:dream-tiny", device="cpu")
    made = llm.generate("Hello", DecodeConfig(max_new_tokens=32)).trace
    records = [json.loads(line) for line in trace.lines(made)]
    records[2][part][0][name] = value
    page = open_page()
    page.evaluate(DROP, "\n".join(map(json.dumps, records)))
    alert = page.get_by_role("alert").first
    expect(alert).to_contain_text("run.jsonl is not a complete lopa trace")
    expect(alert).to_contain_text("round 2 is out of range")
    expect(page.locator("#welcome")).to_be_visible()


def test_more_positions_than_the_page_shows(open_page: OpenPage) -> None:
    llm = LLM("dummy:dream-tiny", device="cpu")
    made = llm.generate("Hello", DecodeConfig(max_new_tokens=32)).trace
    records = [json.loads(line) for line in trace.lines(made)]
    records[1]["blocks"][-1]["end"] = 200_000
    page = open_page()
    page.evaluate(DROP, "\n".join(map(json.dumps, records)))
    alert = page.get_by_role("alert").first
    expect(alert).to_contain_text("a block of round 1 ends 199995 positions after the prompt")
    expect(page.locator("#welcome")).to_be_visible()


def test_nested_files_are_refused(open_page: OpenPage) -> None:
    page = open_page()
    nested = "[" * 100_000 + "]" * 100_000
    page.evaluate(DROP, f'{{"type": "run", "version": 2, "prompt_ids": {nested}}}')
    expect(page.get_by_role("alert").first).to_contain_text("token is out of range")
    expect(page.locator("#welcome")).to_be_visible()
