"""Gaps between pinned text: every window against the plain loop, and what never changes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up import EOS, MASK, VOCAB, MadeUp, MadeUpRanking, advance, drive
from plain_gaps import plain_gaps, spans_of
from plain_loop import Draft, PlainModel
from test_plain_loop import (
    STEEP,
    Predictable,
    accepts,
    check_agreement,
    check_rows,
    examples,
    lookaheads,
    prompts,
    scores,
    thresholds,
)

from lopa.config import DecodeConfig
from lopa.decoding.decoder import Decoder
from lopa.decoding.length_search import MAX_LENGTHS, LengthSearch, canvas_of, lengths_to_try
from lopa.decoding.windows import layout_of_gaps
from lopa.types import Gap, Plan, Stats

texts = st.lists(st.integers(0, VOCAB), min_size=1, max_size=6).map(tuple)
gaps = st.lists(
    st.builds(Gap, st.integers(1, 9).map(lambda n: (n,)), texts), min_size=1, max_size=3
)
windows = st.one_of(
    st.just({"window": "canvas"}),
    st.fixed_dictionaries(
        {
            "window": st.just("blocks"),
            "block_size": st.sampled_from([1, 3, 8]),
            "cache": st.sampled_from(["none", "prefix", "dual"]),
        }
    ),
    st.fixed_dictionaries(
        {
            "window": st.just("pipeline"),
            "block_size": st.sampled_from([1, 3, 8]),
            "activate_at": st.sampled_from([0.0, 0.5, 1.0]),
        }
    ),
)
made_up = st.builds(
    MadeUpRanking,
    seed=st.integers(0, 2**31),
    levels=st.sampled_from([None, 4]),
    steady=st.sampled_from([0.0, 0.7, 1.0]),
)


def decoder_of(
    config: DecodeConfig, prompt: list[int], given: list[Gap], shift: bool = True
) -> Decoder:
    model: dict[str, Any] = {"mask_id": MASK, "eos_ids": [EOS], "shift": shift}
    return Decoder(config, prompt, gaps=given, cost=STEEP, **model)


@examples(300)
@given(made_up, thresholds, windows, lookaheads, accepts, scores, gaps, prompts, st.booleans())
def test_every_window_is_the_plain_loop(
    source: MadeUp,
    threshold: float,
    window: dict[str, Any],
    ahead: dict[str, Any],
    accept: dict[str, Any],
    score: dict[str, Any],
    given_gaps: list[Gap],
    prompt: list[int],
    shift: bool,
) -> None:
    new = sum(n for (n,), _ in given_gaps)
    options = {**window, **ahead, **accept, **score, "early_stop": True}
    config = DecodeConfig(max_new_tokens=new, threshold=threshold, **options)
    decoder = decoder_of(config, prompt, given_gaps, shift)
    canvas = canvas_of(given_gaps, MASK)
    pinned = [p for p, t in enumerate(prompt + canvas) if t != MASK]
    before = decoder.tokens.copy()
    records, asked = [], []
    while (plan := decoder.plan()) is not None:
        assert plan.never == (EOS,)
        assert plan.block_ids is None
        window_end = plan.start + plan.rows.shape[1]
        if config.cache != "dual":  # each forward reaches to the end of the text
            assert window_end == len(prompt) + len(canvas)
        seen = [p for p in pinned if plan.start <= p < window_end]
        assert (plan.rows[:, np.array(seen, int) - plan.start] == before[seen]).all()
        assert not plan.wanted[:, np.array(seen, int) - plan.start].any()
        asked.append(plan.wanted.sum(axis=1).tolist())
        records.append(advance(decoder, source.stats(decoder, plan)))
        assert (decoder.tokens[pinned] == before[pinned]).all()
    tried = [len(record.branches) - 1 for record in records[1:]]
    tried.append(len(records[-1].spawned))
    model = PlainModel(MASK, [], shift)
    expected = plain_gaps(prompt, canvas, source.at, config, model, tried)
    for record, wanted, plain, count in zip(records, asked, expected.rounds, tried, strict=True):
        assert wanted == [masks for masks, *_ in plain.rows]
        check_rows(record, plain.rows, plain.scores)
        check_agreement(record, plain)
        assert record.winner == plain.winner
        assert [(f.position, f.token, f.max_prob, f.kind) for f in record.fills] == plain.fills
        spawned = [Draft(a.position, a.token, a.confidence, a.max_prob) for (a,) in record.spawned]
        assert spawned[:count] == plain.spawned
        assert (record.start, record.committed) == (plain.start, plain.commit)
    assert decoder.generated.tolist() == expected.tokens
    assert decoder.finish == "filled"
    assert decoder.limit == len(expected.tokens)


@examples(200)
@given(st.integers(1, 40), st.integers(1, 60), st.integers(1, 40), st.integers(1, 33))
def test_blocks_over_gaps(prompt: int, region: int, behind: int, size: int) -> None:
    config = DecodeConfig(block_size=size)
    layout = layout_of_gaps(prompt, region, behind, config)
    ends = [layout.base + i * layout.size for i in range(layout.count + 1)]
    assert list(pairwise(ends)) == spans_of(prompt, region, behind, size)
    assert layout.end == prompt + region + behind
    assert 0 <= layout.base <= prompt


@pytest.mark.parametrize(
    "window",
    [{"window": "canvas"}, {"window": "blocks", "block_size": 5}, {"block_size": 4}],
    ids=["canvas", "blocks", "pipeline"],
)
def test_exact_fills_gaps_as_no_branches_do(window: dict[str, Any]) -> None:
    saved = 0
    for seed in range(10):
        source = Predictable(seed)
        given_gaps = [Gap((9,), (1, 2)), Gap((4,), (3,))]
        options = {"max_new_tokens": 13, "threshold": 0.6, **window}
        alone = decoder_of(DecodeConfig(branches=0, **options), [1, 2, 3], given_gaps)
        rounds = len(drive(alone, source))
        ahead = DecodeConfig(branches=5, accept="exact", **options)
        decoder = decoder_of(ahead, [1, 2, 3], given_gaps)
        saved += rounds - len(drive(decoder, source))
        assert decoder.generated.tolist() == alone.generated.tolist()
    assert saved > 0


def test_edits_leave_pinned_tokens_alone() -> None:
    for seed in range(10):
        config = DecodeConfig(max_new_tokens=9, edit_threshold=0.3, block_size=4)
        given_gaps = [Gap((5,), (1, 2, 3)), Gap((4,), (3, 3))]
        decoder = decoder_of(config, [1, 2, 3], given_gaps)
        pinned = decoder.tokens != MASK
        text = decoder.tokens[pinned].tolist()
        while (plan := decoder.plan()) is not None:
            assert not plan.wanted[:, pinned[plan.start : plan.start + plan.rows.shape[1]]].any()
            advance(decoder, MadeUp(seed).stats(decoder, plan))
            assert decoder.tokens[pinned].tolist() == text
        assert MASK not in decoder.tokens


# -- length search ----------------------------------------------------------------------------


class KnowsTheText(MadeUp):
    """A model that knows one text. What fits it is certain, anything else is a guess, and what it
    does not expect is unlikely."""

    def __init__(self, seed: int, text: list[int]) -> None:
        super().__init__(seed)
        self.text = text

    def at(self, index: int, row: tuple[int, ...], position: int) -> tuple[int, float, float]:
        token, probability, ranking = super().at(0, (), position)
        known = [p for p, t in enumerate(row) if t != MASK]
        fits = all(p < len(self.text) and row[p] == self.text[p] for p in known)
        if fits and position < len(self.text):
            return self.text[position], 0.98, -0.01
        return token, 0.5 * probability, ranking - 1

    def stats(self, decoder: Decoder, plan: Plan) -> Stats:
        found = super().stats(decoder, plan)
        if plan.expected is None:
            return found
        expected = plan.expected[plan.wanted]
        likely = np.where(found.token == expected, found.max_prob, 0.01)
        return Stats(expected, likely, found.ranking)


@pytest.mark.parametrize("length", [1, 4, 7])
def test_the_likeliest_length_is_found_and_then_filled(length: int) -> None:
    rng = np.random.default_rng(length)
    text = rng.integers(VOCAB, size=30).tolist()
    prompt, after = text[:6], tuple(text[6 + length :])
    config = DecodeConfig(max_new_tokens=9, branches=2)
    searched = decoder_of(config, prompt, [Gap((2, *lengths_to_try(9)), after)])
    source = KnowsTheText(3, text)
    assert len(searched.tokens) == 6 + 9 + len(after)  # room for the longest
    assert searched.settled == 0
    rounds = []
    while (plan := searched.plan()) is not None:  # rows of the search are not its branches
        searched.choose(source.stats(searched, plan))
        rounds.append(searched.record())
    assert searched.generated.tolist() == text[6 : 6 + length]
    given_one = decoder_of(config, prompt, [Gap((length,), after)])
    same = drive(given_one, source)
    # Decoding begins anew, so that it is what a given length brings.
    assert [r.fills for r in rounds[-len(same) :]] == [r.fills for r in same]
    search = rounds[: -len(same)]
    assert [len(r.branches) for r in search] == [1, 9, 9, 9, 9]  # prompt, fills, check
    assert [r.committed for r in search] == [6, 0, 0, 0, 0]
    assert search[-1].winner == length - 1
    assert [b.end - 6 for b in search[1].branches] == [n + len(after) for n in range(1, 10)]
    assert all(not r.fills and not b.lookaheads for r in search for b in r.branches)


def test_rows_of_a_search() -> None:
    """Every length is a row of one forward, the text behind it in sight, until it is checked."""
    config = DecodeConfig(max_new_tokens=4, threshold=0.9)
    search = LengthSearch([5, 5, 5], [Gap((1, 4), (1, 2))], MASK, (EOS,), config)
    first = search.plan(1)
    assert first.rows.tolist() == [[5, 5, 5, *[MASK] * 4, 1, 2]]
    assert (first.start, first.cached, first.commit) == (0, 0, 3)
    search.choose(first, _certain([0] * 4))
    plan = search.plan(2)
    assert plan.rows.tolist() == [[MASK, 1, 2, 0, 0, 0], [*[MASK] * 4, 1, 2]]
    assert plan.row_ends.tolist() == [3 + 3, 3 + 6]
    assert (plan.start, plan.cached, plan.commit, plan.never) == (3, 3, 0, (EOS,))
    assert plan.wanted.sum(axis=1).tolist() == [1, 4]
    search.choose(plan, _certain([7, 3, 3, 3, 3]))
    read = search.plan(3)  # all are full by now
    # Four tokens at a time are hidden, and nothing behind them is there.
    rows = [row[: end - 3].tolist() for row, end in zip(read.rows, read.row_ends, strict=True)]
    assert rows == [[MASK] * 3, [MASK] * 4, [3, 3, 3, 3, MASK, MASK]]
    assert read.expected is not None
    assert read.expected[read.wanted].tolist() == [7, 1, 2, 3, 3, 3, 3, 1, 2]
    unlikely = _certain([7, 1, 2, 3, 3, 3, 3, 1, 2])
    unlikely.max_prob[-1] = 0.01
    record = search.choose(read, unlikely)
    assert record.winner == 0
    assert [b.score for b in record.branches] == pytest.approx(
        [(0.5 + 2) * np.log(0.95), (2 + 1) * np.log(0.95) + np.log(0.01)]
    )
    assert [bool(b.refused) for b in record.branches] == [False, True]
    assert search.found == (Gap((1,), (1, 2)),)


def _certain(tokens: list[int]) -> Stats:
    count = len(tokens)
    return Stats(np.array(tokens, np.int64), np.full(count, 0.95), np.full(count, -0.1))


@pytest.mark.parametrize("most", [1, 5, 40, 41, 100, 4000])
def test_lengths_to_try(most: int) -> None:
    lengths = lengths_to_try(most)
    assert lengths[0] == 1
    assert lengths[-1] == most
    assert len(lengths) == len(set(lengths)) == min(most, MAX_LENGTHS)
    assert list(lengths) == sorted(lengths)


def test_the_maximum_of_rounds_counts_the_search() -> None:
    config = DecodeConfig(max_new_tokens=4, max_rounds=3)
    decoder = decoder_of(config, [1, 2], [Gap((1, 4), (1, 2))])
    assert len(drive(decoder, MadeUp(0))) == 3
    assert decoder.finish == "rounds"
