"""Filling gaps with a model: against loops over plain forwards, and what a caller sees."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

import goldens
from lopa import LLM, LopaError
from lopa.engine.prompts import Infill
from lopa.engine.scheduler import Scheduler
from lopa.types import Trace
from reference_runner import ReferenceRunner

WINDOWS: dict[str, dict[str, Any]] = {
    "canvas": {"window": "canvas"},
    "no cache": {"window": "blocks", "block_size": 5, "cache": "none"},
    "prefix cache": {"window": "blocks", "block_size": 5, "cache": "prefix"},
    "dual cache": {"window": "blocks", "block_size": 5, "cache": "dual"},
    "pipeline": {"block_size": 5, "activate_at": 0.5},
}
PREFIX, SUFFIX, GAP = "Before the gap, ", " and behind it.", 13


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("dummy:dream-tiny", device="cpu", dtype="float64")


def masks_of(row: list[int], llm: LLM) -> list[int]:
    return [p for p, token in enumerate(row) if token == llm.config.mask_id]


def fill_plainly(
    llm: LLM, given: list[int], gap: int, after: list[int], choose: Callable[..., list[int]]
) -> list[int]:
    """Whole forwards without a cache; choose(masks, max_prob) says which are filled."""
    row = [*given, *[llm.config.mask_id] * gap, *after]
    while masks := masks_of(row, llm):
        logits = llm.forward(row).double()[[p - 1 for p in masks]]
        probs = logits.softmax(-1)
        logits[:, [llm.config.mask_id, *llm.config.eos_ids]] = -torch.inf
        tokens = logits.argmax(-1)
        max_prob = probs.gather(1, tokens[:, None])[:, 0]
        ranking = (probs * (probs + 1e-10).log()).sum(-1)
        for index in choose(masks, max_prob.tolist(), ranking.tolist()):
            row[masks[index]] = int(tokens[index])
    return row[len(given) : len(given) + gap]


def test_canvas_and_blocks_without_a_cache_are_whole_forwards(llm: LLM) -> None:
    """Exact: nothing is cached, and every forward sees all of the text."""
    given, after, threshold = llm.encode(PREFIX), llm.encode(SUFFIX), 0.05

    def on_canvas(masks: list[int], max_prob: list[float], ranking: list[float]) -> list[int]:
        passed = [i for i, p in enumerate(max_prob) if p > threshold]
        return passed or [int(np.argmax(ranking))]

    def in_blocks(masks: list[int], max_prob: list[float], ranking: list[float]) -> list[int]:
        # Blocks of 5, 5 and 5: two of the tokens behind the gap make the last one whole.
        first = (masks[0] - len(given)) // 5
        here = [i for i, p in enumerate(masks) if (p - len(given)) // 5 == first]
        best = max(here, key=lambda i: ranking[i])
        return sorted({best, *(i for i in here if max_prob[i] >= threshold)})

    for window, rule in (("canvas", on_canvas), ("no cache", in_blocks)):
        options = {"branches": 0, "threshold": threshold, **WINDOWS[window]}
        output = llm.infill(PREFIX, SUFFIX, gap_tokens=GAP, **options)
        assert output.token_ids == fill_plainly(llm, given, GAP, after, rule)


@pytest.mark.parametrize("accept", ["agreed", "score", "exact"])
@pytest.mark.parametrize("window", WINDOWS)
def test_caches_are_those_of_a_plain_runner(llm: LLM, window: str, accept: Any) -> None:
    """A cache is an approximation as published: the same one in a runner without pages."""
    infill = Infill(PREFIX, ((4, " middle "), (GAP, SUFFIX)))
    for branches in (0, 3):
        options = {**WINDOWS[window], "threshold": 0.04, "branches": branches, "accept": accept}
        config = llm.decode_config(max_new_tokens=GAP + 4, **options)
        found = llm.generate(infill, config)
        plain = llm.session(infill, config)
        for _ in Scheduler(ReferenceRunner(llm.model)).run(iter([plain])):
            pass
        assert plain.output is not None
        assert found.token_ids == plain.output.token_ids
        assert found.rounds == plain.output.rounds
        assert found.finish == "filled"
        assert len(found.gaps) == 2
        assert found.text == found.gaps[0] + " middle " + found.gaps[1]
        assert len(found.token_ids) == 4 + 8 + GAP


def test_no_end_of_text_is_placed_in_a_gap() -> None:
    """Even where the model predicts nothing else."""
    ends = list(range(0, 256, 2))
    llm = LLM("dummy:dream-tiny", device="cpu", eos_token_id=ends)
    for temperature in (0.0, 1.0):
        for options in WINDOWS.values():
            output = llm.infill("x", "y", gap_tokens=11, temperature=temperature, **options)
            assert output.finish == "filled"
            assert len(output.token_ids) == 11
            assert not {*output.token_ids} & {*ends, llm.config.mask_id}


def test_a_stream_gives_the_gap_in_order(llm: LLM) -> None:
    config = llm.decode_config(max_new_tokens=GAP, threshold=0.04, block_size=5)
    infill = Infill(PREFIX, ((GAP, SUFFIX),))
    events = list(llm.stream(infill, config))
    output = events[-1].output
    assert output is not None
    assert "".join(event.text for event in events) == output.text == output.gaps[0]
    assert all(len(event.tokens) == GAP for event in events)
    assert [len(event.text) for event in events].count(0) < len(events)


def test_a_stop_string_ends_the_gap(llm: LLM) -> None:
    config = llm.decode_config(max_new_tokens=GAP, threshold=0.04, branches=0, window="canvas")
    infill = Infill(PREFIX, ((GAP, SUFFIX),))
    whole = llm.generate(infill, config).text
    stop = whole[3:5]
    output = llm.generate(infill, config.changed(stop=[stop]))
    assert output.text == whole[: whole.index(stop)]
    assert output.finish == "stop"


def test_gaps_and_plain_prompts_in_one_batch(llm: LLM) -> None:
    config = llm.decode_config(max_new_tokens=8, block_size=4)
    infill, searched = Infill("ab", ((5, "cd"),)), Infill([1, 2], (((2, 3), [4, 5]),))
    alone = [llm.generate(p, config).token_ids for p in (infill, "Hello", searched)]
    together = llm.generate([infill, "Hello", searched], config)
    assert [output.token_ids for output in together] == alone


def test_searching_is_trying_every_length_and_filling_one(llm: LLM) -> None:
    output = llm.infill(PREFIX, SUFFIX, max_new_tokens=6, threshold=0.04)
    (length,) = output.trace.gap_tokens
    assert output.tokens == length <= 6
    given = llm.infill(PREFIX, SUFFIX, gap_tokens=length, threshold=0.04)
    assert output.token_ids == given.token_ids
    searching = output.rounds - given.rounds
    rows = [len(record.branches) for record in output.trace.rounds[:searching]]
    assert rows == [1, *[6] * (searching - 1)]
    chosen = llm.infill(PREFIX, SUFFIX, gap_tokens=[4, 9])
    assert chosen.tokens in (4, 9)


def test_a_trace_tells_of_pinned_text(llm: LLM) -> None:
    from lopa import trace

    output = llm.fill(["ab", 3, "cd", 2, "e"])
    again = trace.parse(trace.lines(output.trace))
    assert isinstance(again, Trace)
    assert again == output.trace
    assert again.pinned_ids == [llm.encode("cd"), llm.encode("e")]
    assert again.gap_tokens == [3, 2]
    ends = [b.end for record in again.rounds for b in record.branches]
    assert {*ends} == {2 + 3 + 2 + 2 + 1}
    assert "pinned_ids" not in next(trace.lines(llm.generate("ab", max_new_tokens=4).trace))


def test_a_tiny_prompt_and_suffix(llm: LLM) -> None:
    """Blocks need not fit: every length, with one token on either side."""
    for gap, size in ((1, 4), (2, 4), (5, 4), (7, 3), (9, 2)):
        for window in WINDOWS.values():
            options = {**window, "block_size": size} if "block_size" in window else window
            assert len(llm.infill([1], [2], gap_tokens=gap, **options).token_ids) == gap


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"attention": "block"}, "cannot see the text behind it: use attention full"),
        ({"early_stop": False}, "parity mode"),
        ({"gap_tokens": 0}, "at least 1"),
        ({"gap_tokens": "4"}, "at least 1"),
        ({"gap_tokens": []}, "at least 1"),
        ({"gap_tokens": list(range(1, 99))}, "too many"),
        ({"gap_tokens": 5000}, "context holds"),
        ({"suffix": ""}, "no text behind the gap"),
        ({"suffix": 5}, "string or token ids"),
        ({"suffix": [258]}, "mask token"),
    ],
)
def test_refusals(llm: LLM, options: dict[str, Any], said: str) -> None:
    with pytest.raises(LopaError, match=said) as caught:
        llm.infill("x", **{"suffix": "y", **options})
    assert "\n" not in str(caught.value)


def test_pieces_are_checked(llm: LLM) -> None:
    for pieces in (["x"], ["x", 3], ["x", 3, "y", 4], "x3y"):
        with pytest.raises(LopaError, match="pieces are text, a gap"):
            llm.fill(pieces)
    with pytest.raises(LopaError, match="lengths have to be given"):
        llm.fill(["x", [1, 2], "y", 3, "z"])
    with pytest.raises(LopaError, match="one gap"):
        llm.fill(["x", 2, "y", 3, "z"], stop="a")


def test_block_causal_models_refuse() -> None:
    for path in (goldens.MODELS / "sdar_a", goldens.MODELS / "llada2_a"):
        llm = LLM(path, device="cpu", dtype="float32", mask_token_id=100)
        with pytest.raises(LopaError, match="block-causal, so a gap cannot see"):
            llm.infill([1, 2, 3], [4, 5])


def test_gap_texts_follow_one_another(llm: LLM) -> None:
    output = llm.fill(["a", 3, "bc", 2, "d", 4, "e"])
    assert llm.tokenizer is not None
    assert output.text == llm.tokenizer.decode(output.token_ids)
    found = [output.gaps[0], "bc", output.gaps[1], "d", output.gaps[2]]
    places = [output.text.find(part) for part in found]
    assert all(left <= right for left, right in pairwise(places))
    assert output.summary()["gap_tokens"] == [3, 2, 4]
