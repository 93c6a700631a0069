"""Every decoder, round by round, against the slow loops of plain_loop.py on made-up statistics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_up import EOS, MASK, VOCAB, MadeUp, MadeUpRanking, advance, drive
from plain_loop import (
    Draft,
    PlainModel,
    PlainRound,
    PlainRun,
    StatsOf,
    plain_blocks,
    plain_llada2,
    plain_pipeline,
    plain_sdar,
)

from lopa.config import DecodeConfig
from lopa.decoding.decoder import Decoder
from lopa.decoding.round_cost import EVERY_ROUND_THE_SAME, RoundCost
from lopa.presets import PAPER
from lopa.types import Round

PlainLoop = Callable[[list[int], StatsOf, DecodeConfig, PlainModel, Sequence[int]], PlainRun]
STEEP = RoundCost(((8, 1.0), (64, 3.0)))  # so that "auto" has something to weigh


def examples(count: int) -> settings:
    slow = [HealthCheck.too_slow]  # a busy machine is no fault
    return settings(max_examples=count, deadline=None, suppress_health_check=slow)


def check(
    loop: PlainLoop,
    source: MadeUp,
    config: DecodeConfig,
    prompt: list[int],
    *,
    eos: list[int],
    shift: bool = True,
    aligned: bool = False,
) -> list[Round]:
    cost = STEEP if config.branches == "auto" else EVERY_ROUND_THE_SAME
    decoder = Decoder(
        config, prompt, mask_id=MASK, eos_ids=eos, shift=shift, aligned=aligned, cost=cost
    )
    records, asked = [], []
    while (plan := decoder.plan()) is not None:
        asked.append(plan.wanted.sum(axis=1).tolist())
        records.append(advance(decoder, source.stats(decoder, plan)))
    model = PlainModel(MASK, eos, shift, aligned)
    tried = [len(record.branches) - 1 for record in records[1:]]
    tried.append(len(records[-1].spawned))
    expected = loop(prompt, source.at, config, model, tried)
    for record, wanted, plain, count in zip(records, asked, expected.rounds, tried, strict=False):
        asked_for = [masks for masks, *_ in plain.rows]  # statistics of these, no others
        assert wanted == (asked_for if plain.asked is None else [plain.asked])
        check_rows(record, plain.rows, plain.scores)
        check_agreement(record, plain)
        assert record.winner == plain.winner
        assert [(f.position, f.token, f.max_prob, f.kind) for f in record.fills] == plain.fills
        spawned = [Draft(a.position, a.token, a.confidence, a.max_prob) for (a,) in record.spawned]
        assert spawned[:count] == plain.spawned
        assert count == len(spawned) or config.branches == "auto"
        assert (record.start, record.committed) == (plain.start, plain.commit)
    assert len(records) == len(expected.rounds)
    assert decoder.generated.tolist() == expected.tokens
    assert decoder.finish == expected.finish
    return records


def check_rows(record: Round, rows: list[tuple[int, int, bool]], scores: list[float]) -> None:
    assert [(b.masks, b.end, b.eos) for b in record.branches] == rows
    assert [b.score for b in record.branches] == pytest.approx(scores, rel=1e-12, abs=1e-12)


def check_agreement(record: Round, plain: PlainRound) -> None:
    opinions = [(o.token, o.max_prob) for branch in record.branches for o in branch.anchor]
    assert opinions == plain.opinions
    assert {row for row, branch in enumerate(record.branches) if branch.refused} == plain.refused


# A quarter is exact in binary: what is drawn in quarters ties, with other draws and with the
# thresholds and floors below.
QUARTERS = 4
thresholds = st.sampled_from([0.0, 0.25, 0.5, 0.75, 0.9, 1.0])
sources = st.builds(
    MadeUpRanking,
    seed=st.integers(0, 2**31),
    levels=st.sampled_from([None, QUARTERS]),
    eos_share=st.sampled_from([0.0, 0.0, 0.02, 0.2]),
    steady=st.sampled_from([0.0, 0.7, 1.0]),
)
prompts = st.lists(st.integers(0, VOCAB), min_size=1, max_size=9)  # an EOS there ends nothing
ends = st.sampled_from([[EOS], [EOS, 3]])
lookaheads = st.fixed_dictionaries(
    {
        "branches": st.one_of(st.integers(0, 5), st.just("auto")),
        "lookahead_floor": st.sampled_from([0.0, 0.25, 0.3, 0.75]),
        "lookahead_eos": st.booleans(),
        "early_stop": st.booleans(),
    }
)
scores = st.one_of(
    st.fixed_dictionaries(
        {"score": st.just("fills"), "creation_weight": st.sampled_from([0.0, 0.5, 1.0])}
    ),
    st.fixed_dictionaries(
        {
            "score": st.just("mean"),
            "creation_weight": st.sampled_from([0.0, 0.0, 0.25]),
            "score_fraction": st.sampled_from([1.0, 1.0, 0.5]),
        }
    ),
)
accepts = st.one_of(
    st.just({"accept": "score"}),
    st.fixed_dictionaries(
        {
            "accept": st.just("agreed"),
            "agreement": st.sampled_from([0.0, 0.1, 0.25, 0.5, 1.0]),
            "agreement_ahead": st.sampled_from([0.0, 0.1, 0.25, 0.75]),
            "merge": st.booleans(),
        }
    ),
)
shares = st.sampled_from([0.0, 0.1, 0.3, 0.5, 0.95, 1.0])
pipelines = st.fixed_dictionaries(
    {
        "block_size": st.sampled_from([1, 3, 8]),
        "append_at": shares,
        "activate_at": shares,
        "attention": st.sampled_from(["full", "block"]),
    }
)


@examples(200)
@given(
    sources, st.sampled_from([1, 2, 3, 7]), thresholds, pipelines, st.integers(1, 5), prompts, ends
)
def test_the_defaults(
    source: MadeUp,
    branches: int,
    threshold: float,
    shape: dict[str, Any],
    blocks: int,
    prompt: list[int],
    eos: list[int],
) -> None:
    """Nothing is given but sizes and thresholds: how it looks ahead and when it stops is as usual.
    One branch has no rivals."""
    new = blocks * shape["block_size"]
    config = DecodeConfig(max_new_tokens=new, branches=branches, threshold=threshold, **shape)
    check(plain_pipeline, source, config, prompt, eos=eos)


@examples(240)
@given(
    sources,
    thresholds,
    pipelines,
    lookaheads,
    accepts,
    scores,
    st.integers(1, 5),
    prompts,
    ends,
    st.booleans(),
)
def test_the_pipeline(
    source: MadeUp,
    threshold: float,
    shape: dict[str, Any],
    ahead: dict[str, Any],
    accept: dict[str, Any],
    score: dict[str, Any],
    blocks: int,
    prompt: list[int],
    eos: list[int],
    aligned: bool,
) -> None:
    new = blocks * shape["block_size"]
    options = {**shape, **ahead, **accept, **score}
    config = DecodeConfig(max_new_tokens=new, threshold=threshold, **options)
    check(plain_pipeline, source, config, prompt, eos=eos, aligned=aligned)


@examples(60)
@given(sources, thresholds, pipelines, st.booleans(), st.booleans(), prompts)
def test_d2f(
    source: MadeUp,
    threshold: float,
    shape: dict[str, Any],
    early_stop: bool,
    aligned: bool,
    prompt: list[int],
) -> None:
    new = 3 * shape["block_size"] + (0 if early_stop else shape["block_size"] // 2)
    config = DecodeConfig(
        decoder="d2f", max_new_tokens=new, threshold=threshold, early_stop=early_stop, **shape
    )
    check(plain_pipeline, source, config, prompt, eos=[EOS], aligned=aligned)


blocks = st.fixed_dictionaries(
    {
        "block_size": st.sampled_from([1, 3, 8]),
        "cache": st.sampled_from(["none", "prefix", "dual"]),
    }
)
rules = st.one_of(
    st.builds(lambda t: {"threshold": t}, thresholds),
    st.builds(lambda f: {"factor": f}, st.sampled_from([0.5, 1.0, 3.0])),
    st.builds(lambda s: {"steps": s}, st.sampled_from([1, 2, 3, 7, 12])),  # times the blocks
)


@examples(120)
@given(sources, blocks, rules, st.integers(1, 3), st.booleans(), st.booleans(), prompts)
def test_fast_dllm(
    source: MadeUp,
    shape: dict[str, Any],
    rule: dict[str, Any],
    count: int,
    shift: bool,
    early_stop: bool,
    prompt: list[int],
) -> None:
    if "steps" in rule:
        rule = {"steps": rule["steps"] * count}
    config = DecodeConfig(
        decoder="fast-dllm",
        max_new_tokens=count * shape["block_size"],
        early_stop=early_stop,
        **shape,
        **rule,
    )
    check(plain_blocks, source, config, prompt, eos=[EOS], shift=shift)


@examples(100)
@given(
    sources, thresholds, blocks, lookaheads, accepts, scores, st.booleans(), st.booleans(), prompts
)
def test_lookahead_on_blocks_and_on_the_canvas(
    source: MadeUp,
    threshold: float,
    shape: dict[str, Any],
    ahead: dict[str, Any],
    accept: dict[str, Any],
    score: dict[str, Any],
    canvas: bool,
    shift: bool,
    prompt: list[int],
) -> None:
    window: dict[str, Any] = {"window": "canvas"} if canvas else {"window": "blocks", **shape}
    new = 2 * shape["block_size"]
    options = {**window, **ahead, **accept, **score}
    config = DecodeConfig(max_new_tokens=new, threshold=threshold, **options)
    check(plain_blocks, source, config, prompt, eos=[EOS], shift=shift)


WINDOWS: dict[str, dict[str, Any]] = {
    "pipeline": {"block_size": 6, "append_at": 0.3, "activate_at": 0.5},
    "block attention": {"block_size": 6, "append_at": 0.3, "attention": "block"},
    "blocks": {"window": "blocks", "block_size": 12},
    "blocks without a cache": {"window": "blocks", "block_size": 12, "cache": "none"},
    "canvas": {"window": "canvas"},
}


@pytest.mark.parametrize("branches", [1, 3, 7, "auto"])
@pytest.mark.parametrize("window", WINDOWS)
def test_branches_that_agree_are_merged(window: str, branches: Any) -> None:
    """Where rows mostly predict the same, and some predictions are EOS."""
    loop = plain_blocks if "window" in WINDOWS[window] else plain_pipeline
    rounds: list[Round] = []
    for seed in range(20):
        config = DecodeConfig(
            max_new_tokens=24,
            branches=branches,
            threshold=(0.75, 0.9, 0.95)[seed % 3],
            agreement=(0.1, 0.25)[seed % 2],
            agreement_ahead=(0.1, 0.4)[seed % 2],
            lookahead_eos=seed % 4 == 0,
            **{"score": "mean", "creation_weight": 0.25} if seed % 5 == 0 else {},
            **{"objective": "tpf"} if branches == "auto" and seed % 3 else {},
            **WINDOWS[window],
        )
        source = MadeUpRanking(
            seed=seed,
            levels=QUARTERS if seed % 6 == 0 else None,
            eos_share=(0.0, 0.05, 0.15)[seed % 3],
            steady=(0.9, 0.97, 1.1)[seed // 3 % 3],
        )
        rounds += check(loop, source, config, [1, 2, 3], eos=[EOS], shift=seed % 2 == 0)
    merging = [r for r in rounds if any(f.kind == "merged" for f in r.fills)]
    if branches == 1:
        assert not merging
    else:
        assert len(merging) > 0.1 * len(rounds)


class Predictable(MadeUp):
    """As a model is: whatever the round, and mostly by position alone."""

    def at(self, index: int, row: tuple[int, ...], position: int) -> tuple[int, float, float]:
        token, base, _ = super().at(0, (), position)
        known = sum(t != MASK for t in row) / len(row)
        *_, nudge = super().at(0, row, position)[:2]
        probability = 0.6 * base + 0.3 * known + 0.1 * nudge
        return token, float(np.float32(probability)), float(np.float32(np.log(probability + 1e-3)))


@pytest.mark.parametrize("shape", ["pipeline", "block attention", "blocks", "canvas"])
def test_exact_is_the_plain_loop_without_branches(shape: str) -> None:
    """In fewer rounds, some of the time."""
    windows: dict[str, dict[str, Any]] = {
        "pipeline": {"block_size": 4, "append_at": 0.5, "activate_at": 0.75},
        "block attention": {"block_size": 4, "append_at": 0.5, "attention": "block"},
        "blocks": {"window": "blocks", "block_size": 6},
        "canvas": {"window": "canvas"},
    }
    loop = plain_pipeline if windows[shape].get("window") is None else plain_blocks
    saved = 0
    for seed in range(12):
        options = {"max_new_tokens": 12, "threshold": 0.6, **windows[shape]}
        options |= {"early_stop": seed % 3 > 0}
        source, prompt = Predictable(seed, eos_share=0.1 * (seed % 2)), [1, 2, 3]
        model = PlainModel(MASK, [EOS], shift=seed % 4 < 2)
        expected = loop(prompt, source.at, DecodeConfig(branches=0, **options), model, ())
        for branches in (1, 5, "auto"):
            config = DecodeConfig(branches=branches, accept="exact", **options)
            decoder = Decoder(
                config, prompt, mask_id=MASK, eos_ids=[EOS], shift=model.shift, cost=STEEP
            )
            records = drive(decoder, source)
            assert decoder.generated.tolist() == expected.tokens
            assert decoder.finish == expected.finish
            assert len(records) <= len(expected.rounds)
            saved += len(expected.rounds) - len(records)
    assert saved > 0


@examples(40)
@given(sources, st.integers(1, 30), st.integers(1, 40), st.booleans(), st.booleans(), prompts)
def test_vanilla(
    source: MadeUp, new: int, steps: int, shift: bool, early_stop: bool, prompt: list[int]
) -> None:
    config = DecodeConfig(decoder="vanilla", max_new_tokens=new, steps=steps, early_stop=early_stop)
    check(plain_blocks, source, config, prompt, eos=[EOS], shift=shift)


@examples(120)
@given(
    sources,
    thresholds,
    st.sampled_from([1, 4, 6]),
    st.integers(1, 8),
    st.sampled_from(["confidence", "sequential"]),
    st.booleans(),
    st.booleans(),
    prompts,
)
def test_sdar(
    source: MadeUp,
    threshold: float,
    size: int,
    steps: int,
    order: Any,
    early_stop: bool,
    aligned: bool,
    prompt: list[int],
) -> None:
    config = DecodeConfig(
        decoder="sdar",
        max_new_tokens=3 * size,
        block_size=size,
        steps=steps,
        threshold=threshold,
        order=order,
        early_stop=early_stop,
    )
    check(plain_sdar, source, config, prompt, eos=[EOS], shift=False, aligned=aligned)


@examples(150)
@given(
    source=sources,
    threshold=thresholds,
    edit_threshold=st.one_of(st.none(), thresholds),
    size=st.sampled_from([3, 4, 8]),
    count=st.integers(1, 20),
    steps=st.integers(1, 10),
    quota=st.integers(1, 4),
    edit_rounds=st.sampled_from([0, 1, 2, 16]),
    early_stop=st.booleans(),
    decoder=st.sampled_from(["llada2", "lopa"]),
    prompt=prompts,
)
def test_llada2(
    source: MadeUp,
    threshold: float,
    edit_threshold: float | None,
    size: int,
    count: int,
    steps: int,
    quota: int,
    edit_rounds: int,
    early_stop: bool,
    decoder: Any,
    prompt: list[int],
) -> None:
    """Its own decoder, and the same pieces under lookahead without branches."""
    options: dict[str, Any] = {"quota": quota, "steps": steps}
    if edit_threshold is not None:
        options = {"quota": quota, "edit_threshold": edit_threshold, "edit_rounds": edit_rounds}
    config = DecodeConfig(
        decoder="llada2",
        max_new_tokens=count,
        block_size=size,
        threshold=threshold,
        early_stop=early_stop,
        **options,
    )
    if decoder == "lopa" and early_stop:
        if edit_threshold is None:  # which are not shortened by themselves
            options = {"steps": max(1, min(steps, count // quota))}
        lopa = DecodeConfig(
            decoder="lopa",
            branches=0,
            max_new_tokens=count,
            block_size=size,
            threshold=threshold,
            append_at=1.0,
            activate_at=1.0,
            attention="block",
            **PAPER,
            **options,
        )
        loop: PlainLoop = lambda p, s, _, m, a: plain_llada2(p, s, config, m, a)  # noqa: E731
        check(loop, source, lopa, prompt, eos=[EOS], shift=False, aligned=True)
    else:
        check(plain_llada2, source, config, prompt, eos=[EOS], shift=False, aligned=True)


@examples(100)
@given(
    source=sources,
    branches=st.sampled_from([1, 3, 7, "auto"]),
    accept=st.sampled_from(["score", "agreed"]),
    edit_threshold=thresholds,
    edit_rounds=st.sampled_from([0, 1, 16]),
    append_at=st.sampled_from([0.0, 0.5, 1.0]),
    attention=st.sampled_from(["full", "block"]),
    threshold=thresholds,
    prompt=prompts,
)
def test_editing_under_lookahead(source: MadeUp, prompt: list[int], **options: Any) -> None:
    """Records tell all that happens, and nothing changes that was said to be final."""
    config = DecodeConfig(decoder="lopa", max_new_tokens=12, block_size=4, **options)
    cost = STEEP if config.branches == "auto" else None
    model: dict[str, Any] = {"mask_id": MASK, "eos_ids": [EOS], "shift": False, "aligned": True}
    decoder = Decoder(config, prompt, cost=cost, **model)
    tokens = dict(enumerate(prompt))
    final: list[int] = []
    while (plan := decoder.plan()) is not None:
        record = advance(decoder, source.stats(decoder, plan))
        for ahead in record.branches[record.winner].lookaheads:
            assert ahead.position not in tokens
            tokens[ahead.position] = ahead.token
        for fill in record.fills:
            if fill.kind == "edited":
                assert fill.position >= len(prompt) + len(final)
                assert tokens[fill.position] != fill.token
                assert fill.max_prob > config.edit_threshold
            else:
                assert fill.position not in tokens
            tokens[fill.position] = fill.token
        assert tokens == {p: int(t) for p, t in enumerate(decoder.tokens) if t != MASK}
        new = decoder.generated.tolist()
        assert new[: len(final)] == final
        final = new[: decoder.settled]
    assert decoder.has_eos == (EOS in decoder.generated)
    assert len(final) >= 12 or EOS in final
