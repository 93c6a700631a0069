"""`Output.show`: every token with the round that filled it."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path

import pytest

from lopa import LLM
from lopa.engine.filling_order import _WORDS
from lopa.engine.output import Output
from lopa.models.questions import FUNCTION


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("tiny", device="cpu")


@pytest.fixture(scope="module")
def output(llm: LLM) -> Output:
    return llm.generate(FUNCTION, branches=3, max_new_tokens=64)


def test_every_token_has_the_round_in_which_its_mask_went(llm: LLM) -> None:
    """Against the tokens of a stream, which are masks until they are filled."""
    asked = {"branches": 3, "max_new_tokens": 64}
    mask = llm.config.mask_id
    rounds: dict[int, int] = {}
    for event in llm.stream(FUNCTION, **asked):
        for index, token in enumerate(event.tokens):
            if token != mask:
                rounds.setdefault(index, event.round.index)
    assert event.output is not None
    shown = event.output.show().filled()
    assert len(shown) == len(event.output.token_ids)
    assert [how.round for _, how in shown if how] == [rounds[i] for i in range(len(shown))]
    assert {how.kind for _, how in shown if how} <= set(_WORDS)
    assert any(how.kind == "lookahead" for _, how in shown if how)


def test_the_drawing_holds_the_text(output: Output) -> None:
    drawn = output.show()._repr_html_()
    tokens = re.findall(r'title="[^"]*">([^<]*)<', drawn)
    assert unescape("".join(tokens)).replace("↵", "\n") == output.text + "<|endoftext|>"
    assert f"TPF {output.tpf:.2f}" in drawn
    assert "<script" not in drawn


def test_plain_text_and_a_page(output: Output, tmp_path: Path) -> None:
    order = output.show()
    lines = str(order).splitlines()
    assert len(lines) == 1 + output.rounds
    order.save(tmp_path / "order.html")
    page = (tmp_path / "order.html").read_text(encoding="utf-8")
    assert order._repr_html_() in page


def test_what_was_given_has_no_round(llm: LLM) -> None:
    output = llm.fill(["def f(x):\n    ", 2, " x", 2, "\n"], branches=0)
    given = [piece for piece, how in output.show().filled() if how is None]
    assert "".join(given) == " x"
    assert 'title="given"' in output.show()._repr_html_()


def test_text_of_a_model_is_no_markup() -> None:
    output = LLM("dummy:dream-tiny").generate([1, 2, 3], max_new_tokens=8, block_size=4)
    output.trace.pieces = dict.fromkeys(output.token_ids, "<b>&")
    drawn = output.show()._repr_html_()
    assert "<b>" not in drawn
    assert "&lt;b&gt;&amp;" in drawn
