"""From typing to text: a run as a person meets it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from urllib.parse import parse_qs

from browser_support import HOSTILE, PROMPT, field, filled, run, shown_round
from playwright.sync_api import Page, expect
from serving_support import Server

from lopa import trace

OpenPage = Callable[..., Page]


def test_text_is_the_api_s(open_page: OpenPage, server: Server) -> None:
    answer = server.complete(PROMPT).json()
    page = open_page()
    expect(page.get_by_role("heading", name="How LoPA decodes")).to_be_visible()
    run(page)
    text = page.locator("#answer")
    assert text.text_content() == answer["choices"][0]["text"]
    assert page.locator("#provisional").text_content() == ""
    tokens = answer["usage"]["completion_tokens"]
    rounds = int(page.locator("#count-rounds").text_content() or 0)
    assert int(page.locator("#count-tokens").text_content() or 0) == tokens
    assert page.locator("#count-tpf").text_content() == f"{tokens / rounds:.2f}"
    assert shown_round(page) == rounds

    # Scrubbing: back to nothing but masks, then forward; what is shown only grows.
    page.locator("#scrubber").focus()
    page.keyboard.press("Home")
    expect(page.locator("#count-rounds")).to_have_text("0")
    expect(filled(page)).to_have_count(0)
    assert text.text_content() == ""
    before = 0
    for number in range(1, rounds + 1):
        page.keyboard.press("ArrowRight")
        assert shown_round(page) == number
        assert filled(page).count() > before
        before = filled(page).count()
        fresh = page.locator("#grid .cell.fresh").count()
        assert fresh > 0
        assert page.locator("#lanes .lane.won:visible").count() == 1
    assert text.text_content() == answer["choices"][0]["text"]

    # A token leads to the round that filled it; its details say the same.
    cell = filled(page).first
    match = re.search(r"round (\d+)", cell.get_attribute("aria-label") or "")
    assert match
    cell.click()
    assert shown_round(page) == int(match[1])
    expect(cell).to_have_class(re.compile("fresh"))
    expect(page.get_by_role("tooltip")).to_contain_text(f"round {match[1]} of {rounds}")

    # The grid is one stop of the Tab key; arrows move inside it.
    cell.focus()
    page.keyboard.press("ArrowRight")
    focused = page.evaluate("document.activeElement.dataset.position")
    assert int(focused) == int(cell.get_attribute("data-position") or 0) + 1
    assert page.locator("#grid [tabindex='0']").count() == 1

    # Playing goes to the end by itself.
    page.locator("#speed").select_option("30")
    page.locator("#to-first").click()
    page.get_by_role("button", name="Play").click()
    expect(page.locator("#count-rounds")).to_have_text(str(rounds))
    expect(page.get_by_role("button", name="Play")).to_be_visible()

    # By round, the scale goes from the first to the last.
    page.locator("#colour").select_option("round")
    expect(page.locator("#grid .cell.r0").first).to_be_visible()
    expect(page.locator("#grid .cell.r8").first).to_be_visible()


def test_a_prompt_with_markup_stays_text(open_page: OpenPage) -> None:
    page = open_page("#generate?max_new_tokens=16&branches=1")
    title = page.title()
    run(page, HOSTILE)
    page.locator(".prompt-block summary").click()
    expect(page.locator("#prompt-text")).to_have_text(HOSTILE)
    expect(page.locator("img[src=x], #stage script, #stage b:text('bold')")).to_have_count(0)
    assert page.title() == title


def test_stopping(open_page: OpenPage) -> None:
    page = open_page("#generate?decoder=vanilla&max_new_tokens=64")
    field(page, "Prompt").fill(PROMPT)
    field(page, "Prompt").press("Control+Enter")
    expect(page.locator("#round-label")).to_contain_text("live")
    page.get_by_role("button", name="Stop").click()
    expect(page.locator("#status")).to_contain_text("Stopped in round")
    expect(page.get_by_role("button", name="Run", exact=True)).to_be_visible()


def test_settings_and_their_errors(open_page: OpenPage) -> None:
    page = open_page("#generate?prompt=Hello&branches=5&threshold=0.75", expected=("400",))
    assert field(page, "branches").input_value() == "5"
    assert field(page, "threshold").input_value() == "0.75"
    assert field(page, "Prompt").input_value() == "Hello"

    # A decoder has only its own options; a preset fills in the published ones.
    field(page, "decoder").select_option("d2f")
    expect(field(page, "branches")).to_be_hidden()
    field(page, "preset").select_option("gsm8k")
    expect(field(page, "branches")).to_have_value("14")
    address = parse_qs(page.evaluate("location.hash").split("?", 1)[1])
    assert address["branches"] == ["14"]
    assert address["max_new_tokens"] == ["512"]
    assert "threshold" not in address  # published, but also the default

    # So has each way to accept branches.
    field(page, "preset").select_option("")
    field(page, "decoder").select_option("")
    page.locator("#view-generate summary", has_text="Lookahead").click()
    scored = {"score", "creation_weight"}
    agreed = {"agreement", "agreement_ahead"}
    for accept, offered in {"": scored | agreed, "score": scored, "exact": set()}.items():
        field(page, "accept").select_option(accept)
        for name in scored | agreed:
            expect(field(page, name)).to_be_visible(visible=name in offered)
    field(page, "accept").select_option("")

    # What the server refuses is said at the field.
    field(page, "preset").select_option("")
    field(page, "branches").fill("500")
    page.get_by_role("button", name="Run", exact=True).click()
    expect(page.get_by_role("alert").first).to_contain_text("branches")
    expect(field(page, "branches")).to_have_attribute("aria-invalid", "true")
    field(page, "Prompt").fill("   ")
    page.get_by_role("button", name="Run", exact=True).click()
    expect(page.get_by_role("alert").first).to_have_text(re.compile("Write a prompt first"))


def test_an_answer_that_fits_a_schema(open_page: OpenPage) -> None:
    page = open_page("#generate?max_new_tokens=64", expected=("400",))
    page.locator("#view-generate summary", has_text="Schema").click()
    schema = field(page, "JSON Schema")
    button = page.get_by_role("button", name="Run", exact=True)

    # What is no JSON is not sent; what the server refuses is said at the field.
    schema.fill("{")
    button.click()
    expect(page.locator("#schema-error")).to_contain_text("no JSON")
    expect(schema).to_be_focused()
    schema.fill('{"not": {}}')
    expect(page.locator("#schema-error")).to_be_empty()
    button.click()
    expect(page.locator("#schema-error")).to_contain_text("not")
    expect(schema).to_have_attribute("aria-invalid", "true")

    properties = {"answer": {"type": "integer"}, "sure": {"type": "boolean"}}
    given = {"type": "object", "properties": properties, "required": ["answer", "sure"]}
    schema.fill(json.dumps(given))
    run(page)
    answer = json.loads(page.locator("#answer").text_content() or "")
    assert isinstance(answer["answer"], int)
    assert isinstance(answer["sure"], bool)

    # The address holds it too.
    page.reload()
    page.wait_for_selector("html[data-ready]")
    expect(schema).to_be_visible()
    assert json.loads(schema.input_value()) == given


def test_theme(open_page: OpenPage) -> None:
    page = open_page(theme="dark")
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.get_by_label("Theme").select_option("light")
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert dark != light
    page.reload()
    page.wait_for_selector("html[data-ready]")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == light
    page.get_by_label("Theme").select_option("system")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == dark


def select(page: Page, text: str) -> None:
    """Select the first occurrence in the answer's text, as a person does with the mouse."""
    page.evaluate(
        """(wanted) => {
          const whole = document.getElementById("text");
          const start = whole.textContent.indexOf(wanted);
          const range = document.createRange();
          let at = 0;
          const nodes = document.createTreeWalker(whole, NodeFilter.SHOW_TEXT);
          while (nodes.nextNode()) {
            const node = nodes.currentNode;
            const next = at + node.data.length;
            if (start >= at && start < next) range.setStart(node, start - at);
            const end = start + wanted.length;
            if (end > at && end <= next) range.setEnd(node, end - at);
            at = next;
          }
          getSelection().removeAllRanges();
          getSelection().addRange(range);
        }""",
        text,
    )


def test_a_hole_is_filled_anew(open_page: OpenPage) -> None:
    page = open_page()
    button = page.get_by_role("button", name="Fill anew")
    run(page)
    whole = page.locator("#text")
    before = whole.text_content() or ""
    first, line, *rest = before.split("\n")
    assert rest
    button.click()
    expect(page.locator("#notice")).to_contain_text("Select a part of the text first")

    # As long as it was: what stays is pinned, and the hole has a text again.
    select(page, line)
    button.click()
    expect(page.locator("#status")).to_contain_text(
        "ended by the text behind the gap", timeout=90_000
    )
    assert page.locator("#kept").text_content() == first + "\n"
    behind = page.locator("#behind").text_content() or ""
    assert behind == "\n" + "\n".join(rest)
    filled_text = page.locator("#answer").text_content() or ""
    assert filled_text.strip()
    after = whole.text_content() or ""
    assert after == first + "\n" + filled_text + behind
    cells = filled(page).count()
    assert cells == int(page.locator("#count-tokens").text_content() or 0)
    page.locator("#to-first").click()
    expect(filled(page)).to_have_count(0)
    assert page.locator("#behind").text_content() == behind

    # A length is searched; the lanes are lengths, and the whole text is there again.
    page.locator("#to-last").click()
    page.locator("#gap-length").select_option("search")
    select(page, filled_text)
    button.click()
    expect(page.locator("#status")).to_contain_text("Running", timeout=30_000)
    expect(page.locator("#status")).to_contain_text(
        "ended by the text behind the gap", timeout=90_000
    )
    page.locator("#to-first").click()
    page.locator("#step-forward").click()
    expect(page.locator("#story")).to_contain_text("The prompt goes to the cache")
    page.locator("#step-forward").click()
    expect(page.locator("#story")).to_contain_text("lengths of the gap in one forward")
    assert "token" in (page.locator("#lanes .lane .token").first.text_content() or "")
    page.locator("#to-last").click()
    assert (whole.text_content() or "").startswith(first + "\n")
    assert (whole.text_content() or "").endswith(behind)

    # What is saved is a trace with the pinned text.
    with page.expect_download() as download:
        page.get_by_role("button", name="Save trace").click()
    saved = trace.read(download.value.path())
    assert saved.finish == "filled"
    assert len(saved.pinned_ids) == 1
    page.locator("#file").set_input_files(download.value.path())
    expect(page.locator("#answer")).not_to_have_text("")
    assert page.locator("#behind").text_content() == behind
