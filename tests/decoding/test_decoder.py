"""The pure decoder on made-up statistics, by its properties; test_plain_loop.py has its rules."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up import EOS, MASK, MadeUp, advance, drive, new_decoder

from lopa.config import DecodeConfig

EXAMPLES = settings(max_examples=120, deadline=None)
seeds = st.integers(0, 2**31)
shares = st.sampled_from([0.0, 0.1, 0.3, 0.5, 0.95, 1.0])
sources = st.builds(
    MadeUp,
    seed=seeds,
    levels=st.sampled_from([None, None, 4]),
    eos_share=st.sampled_from([0.0, 0.02, 0.2]),
)
pipelines = st.fixed_dictionaries(
    {
        "size": st.sampled_from([1, 3, 8]),
        "blocks": st.integers(1, 5),
        "append_at": shares,
        "activate_at": shares,
        "threshold": st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    }
)


def pipeline_config(shape: dict[str, Any], **more: Any) -> DecodeConfig:
    shape = dict(shape)
    size, blocks = shape.pop("size"), shape.pop("blocks")
    return DecodeConfig(
        max_new_tokens=size * blocks, block_size=size, early_stop=False, **shape, **more
    )


every_window = st.one_of(
    st.builds(
        lambda size, blocks, steps, tau, order: DecodeConfig(
            decoder="sdar",
            max_new_tokens=size * blocks,
            block_size=size,
            steps=min(steps, size),
            threshold=tau,
            order=order,
            early_stop=False,
        ),
        st.sampled_from([1, 4, 6]),
        st.integers(1, 4),
        st.integers(1, 6),
        st.sampled_from([0.5, 0.9, 1.0]),
        st.sampled_from(["confidence", "sequential"]),
    ),
    pipelines.flatmap(
        lambda shape: st.builds(
            lambda k, a, s: pipeline_config(shape, branches=k, accept=a, score=s),
            st.one_of(st.integers(0, 4), st.just("auto")),
            st.sampled_from(["score", "agreed"]),
            st.sampled_from(["mean", "window", "segment", "fills"]),
        )
    ),
    pipelines.flatmap(
        lambda shape: st.builds(
            lambda k: pipeline_config(shape, branches=k, accept="exact"),
            st.one_of(st.integers(0, 4), st.just("auto")),
        )
    ),
    st.builds(
        lambda size, blocks, cache, tau, k, accept: DecodeConfig(
            decoder="lopa",
            window="blocks",
            max_new_tokens=size * blocks,
            block_size=size,
            cache=cache,
            threshold=tau,
            branches=k,
            accept=accept,
            early_stop=False,
        ),
        st.sampled_from([1, 3, 8]),
        st.integers(1, 4),
        st.sampled_from(["none", "prefix", "dual"]),
        st.sampled_from([0.5, 0.9]),
        st.integers(0, 4),
        st.sampled_from(["score", "agreed", "exact"]),
    ),
    st.builds(
        lambda n, tau, k: DecodeConfig(
            decoder="lopa",
            window="canvas",
            max_new_tokens=n,
            threshold=tau,
            branches=k,
            early_stop=False,
        ),
        st.integers(1, 20),
        st.sampled_from([0.5, 0.9]),
        st.integers(0, 4),
    ),
)


@EXAMPLES
@given(sources, every_window, st.booleans(), st.booleans(), st.integers(1, 9))
def test_invariants(
    source: MadeUp, config: DecodeConfig, shift: bool, aligned: bool, length: int
) -> None:
    decoder = new_decoder(config, length, shift, aligned)
    prompt = decoder.prompt
    rounds = brought = 0
    while (plan := decoder.plan()) is not None:
        rounds += 1
        most = config.max_new_tokens + aligned * decoder.window.size
        assert rounds <= most, "a round filled nothing"
        before = decoder.tokens.copy()
        committed = plan.rows[:, : plan.commit]
        if config.window == "pipeline":  # the other caches hold masks as they stood, by design
            assert not (committed == MASK).any(), "a masked token is committed"
            assert (committed == committed[0]).all(), "branches differ in what is committed"
            assert plan.start == plan.cached
        assert not plan.wanted[plan.rows != MASK].any()
        assert plan.wanted.any(axis=1)[-1], "the anchor has nothing left to decode"
        record = advance(decoder, source.stats(decoder, plan))
        brought += decoder.brought
        after = decoder.tokens
        filled = before != MASK
        assert (after[filled] == before[filled]).all(), "a filled token changed"
        assert (after != MASK).sum() > (before != MASK).sum(), "nothing was filled"
        places = {f.position for f in record.fills}
        places |= {ahead.position for ahead in record.branches[record.winner].lookaheads}
        assert places == set(np.flatnonzero(before != after).tolist())
        assert len(record.branches) <= config.most_branches + 1
        assert record.branches[-1].lookaheads == []
        assert not record.branches[record.winner].refused
        for branch in record.branches:
            assert len(branch.anchor) == len(branch.lookaheads)
            assert all(opinion.token >= 0 for opinion in branch.anchor), "the anchor has no mask"
    answer = decoder.generated.tolist()
    assert MASK not in answer
    assert brought == decoder.filled == (answer.index(EOS) + 1 if EOS in answer else len(answer))
    assert decoder.finish in ("eos", "length")
    assert (len(decoder.tokens) - decoder.window.base) % decoder.window.size == 0
    assert (decoder.tokens[:prompt] != MASK).all()
    if decoder.finish == "length":
        beyond = decoder.window.size - 1 if aligned else 0  # up to the end of the last block
        assert 0 <= len(decoder.generated) - config.max_new_tokens <= beyond


@EXAMPLES
@given(sources, every_window, st.booleans())
def test_the_peeked_row_is_that_of_the_frame_that_opens(
    source: MadeUp, config: DecodeConfig, aligned: bool
) -> None:
    decoder = new_decoder(config, aligned=aligned)
    window, masks = decoder.window, decoder._masks
    while True:
        frame = window.open(masks, [], [decoder.has_eos])
        length, is_waiting = window.peek_row(masks, decoder.has_eos)
        assert length == (0 if frame is None else frame.row_ends[0] - frame.start)
        is_one = frame is not None and frame.first + frame.blocks[0] == 1
        assert is_waiting == (config.window == "pipeline" and is_one and window.count > 1)
        if (plan := decoder.plan()) is None:
            break
        advance(decoder, source.stats(decoder, plan))


@EXAMPLES
@given(
    seeds,
    pipelines,
    st.integers(2, 5),
    st.sampled_from(["score", "agreed"]),
    st.randoms(use_true_random=False),
)
def test_branch_order_does_not_matter(
    seed: int, shape: dict[str, Any], branches: int, accept: str, random: Any
) -> None:
    source = MadeUp(seed)
    decoder = new_decoder(pipeline_config(shape, branches=branches, accept=accept))
    while decoder.plan() is not None:
        shuffled = copy.deepcopy(decoder)
        shuffled._plan = None
        shuffled.round -= 1
        random.shuffle(shuffled.drafts)
        plan, other = decoder.plan(), shuffled.plan()
        assert plan is not None
        assert other is not None
        record = advance(decoder, source.stats(decoder, plan))
        again = advance(shuffled, source.stats(shuffled, other))
        scores = [b.score for b in record.branches if not b.refused]
        if scores.count(max(scores)) > 1:
            continue  # ties go to the best-ranked, which is what order means
        assert shuffled.tokens.tolist() == decoder.tokens.tolist()
        assert again.fills == record.fills


@EXAMPLES
@given(sources, every_window)
def test_a_record_made_while_the_next_round_is_under_way(
    source: MadeUp, config: DecodeConfig
) -> None:
    late, records = new_decoder(config), []
    while (plan := late.plan()) is not None:
        winner = late.choose(source.stats(late, plan))
        late.plan()
        records.append(late.record())
        assert records[-1].winner == winner
        for fill in records[-1].fills:  # the blocks are those that the round found
            (block,) = [b for b in records[-1].blocks if b.start <= fill.position < b.end]
            assert block.masks > 0
            assert block.state in ("active", "semi")
    assert records == drive(new_decoder(config), source)
    with pytest.raises(RuntimeError, match="without a round"):
        late.record()


@EXAMPLES
@given(sources, every_window)
def test_early_stop_is_a_prefix_of_parity(source: MadeUp, config: DecodeConfig) -> None:
    """Stopping early changes when a run ends, never what it says up to EOS."""
    full = new_decoder(config)
    drive(full, source)
    settings = {**config.settings(), "early_stop": True}
    early = new_decoder(DecodeConfig(**settings))
    drive(early, source)
    first = early.first_eos
    if first is None:
        assert early.tokens.tolist() == full.tokens.tolist()
    else:
        assert early.finish == "eos"
        assert early.settled > first
        assert early.generated[: first + 1].tolist() == full.generated[: first + 1].tolist()
        assert early.round <= full.round


@EXAMPLES
@given(sources, pipelines, st.integers(0, 6))
def test_landscapes_are_of_the_masks(source: MadeUp, shape: dict[str, Any], k: int) -> None:
    decoder = new_decoder(pipeline_config(shape, branches=k))
    while (plan := decoder.plan()) is not None:
        stats = source.stats(decoder, plan)
        record = advance(decoder, stats)
        rows, _ = plan.wanted.nonzero()
        for row, branch in enumerate(record.branches):
            seen = np.frombuffer(bytes.fromhex(branch.landscape), np.uint8) / 255
            assert len(seen) == branch.masks
            assert np.abs(seen - stats.max_prob[rows == row]).max(initial=0) <= 1 / 255


def test_round_limit() -> None:
    decoder = new_decoder(DecodeConfig(decoder="d2f", threshold=1.0, max_rounds=3))
    assert len(drive(decoder, MadeUp(1))) == 3
    assert decoder.finish == "rounds"
