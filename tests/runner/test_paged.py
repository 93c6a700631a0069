"""The paged runner against the reference runner, and its KV and prefix caches."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

import goldens
from lopa import LLM, DecodeConfig
from lopa.engine.scheduler import Scheduler
from lopa.errors import CapacityError, ConfigError, LopaError
from lopa.runner.backend_torch import TorchBackend
from lopa.runner.kv_cache import PAGE, KVCache
from lopa.runner.paged import PagedRunner
from lopa.runner.prefix_cache import PrefixCache
from lopa.types import Plan
from reference_runner import ReferenceRunner

MODELS = ["dream_0", "llada_a", "sdar_a", "fastdllm2_a"]


def load(name: str, **options: Any) -> LLM:
    if name == "fastdllm2_a":  # whose published mask lies outside its small vocabulary
        options["mask_token_id"] = 198
    return LLM(goldens.MODELS / name, dtype="float32", device="cpu", **options)


def on_reference(llm: LLM, prompt: list[int], config: DecodeConfig) -> Any:
    paged, llm.runner = llm.runner, ReferenceRunner(llm.model)  # type: ignore[assignment]
    try:
        return llm.generate(prompt, config)
    finally:
        llm.runner = paged


def numbers(seed: int, count: int) -> list[int]:
    return [random.Random(seed * 1000 + i).randrange(1, 150) for i in range(count)]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("attention", ["full", "block"])
def test_equals_the_plain_runner(name: str, attention: Any) -> None:
    llm = load(name)
    if llm.config.trained_block and attention == "full":
        pytest.skip("trained block-causal")
    for seed, branches in enumerate([0, 1, 5]):
        config = llm.decode_config(
            decoder="lopa",
            branches=branches,
            attention=attention,
            max_new_tokens=40,
            block_size=llm.config.trained_block or 8,
            temperature=0.5 * (seed == 2),
        )
        prompt = numbers(seed, 3 + 40 * seed)
        ours, plain = llm.generate(prompt, config), on_reference(llm, prompt, config)
        assert ours.token_ids == plain.token_ids
        for mine, theirs in zip(ours.trace.rounds, plain.trace.rounds, strict=True):
            assert mine.winner == theirs.winner
            scores = [[b.score for b in record.branches] for record in (mine, theirs)]
            np.testing.assert_allclose(*scores, atol=1e-4)
    llm.runner.prefix_cache.clear()
    assert llm.runner.kv_cache.free_pages == llm.runner.kv_cache.total_pages


@pytest.mark.parametrize("name", ["dream_0", "sdar_a"])
def test_a_long_prompt_goes_layer_by_layer(name: str) -> None:
    whole, cut = load(name), load(name)
    cut.runner = PagedRunner(cut.model, 4096, prefill_tokens=50)
    config = cut.decode_config(max_new_tokens=32)
    prompt = numbers(1, 200)
    expected = whole.generate(prompt, config)
    engine = Scheduler(cut.runner, token_budget=400)
    short, long = cut.session(numbers(2, 3), config), cut.session(prompt, config)
    engine.add(short)
    engine.step()
    engine.add(long)
    seen = []
    while long.output is None:
        seen.append([session is long for session, _ in engine.step()])
    # The other one was not kept waiting while the prompt went through.
    assert seen[0] == [False]
    assert long.output.token_ids == expected.token_ids
    assert long.output.rounds == expected.rounds
    while engine.busy:
        engine.step()
    assert short.output is not None
    assert short.output.token_ids == whole.generate(numbers(2, 3), config).token_ids


@pytest.mark.parametrize("name", MODELS)
def test_reused_prefixes_give_the_same_tokens(name: str) -> None:
    first, again = load(name, prefix_reuse="off"), load(name)
    config = again.decode_config(
        decoder="lopa",
        branches=3,
        attention="block",
        max_new_tokens=32,
        block_size=again.config.trained_block or 8,
    )
    prompts = [numbers(1, 75), numbers(1, 75), [*numbers(1, 75), 7, 8], numbers(1, 64), [5] * 40]
    for index, prompt in enumerate(prompts):
        output = again.generate(prompt, config)
        assert output.token_ids == first.generate(prompt, config).token_ids
        began = output.trace.rounds[0].cached
        if index == 1:  # the very same prompt
            assert began == (64 if again.config.trained_block else 75)
        if index == 2:  # one that goes on
            assert began == (64 if again.config.trained_block else 0)
        if index in (0, 4):
            assert began == 0
    again.runner.prefix_cache.clear()
    assert again.runner.kv_cache.free_pages == again.runner.kv_cache.total_pages


def test_a_known_prompt_whose_answer_takes_the_whole_cache() -> None:
    """Its last page would be copied, and both do not fit."""
    llm = load("dream_0", cache_tokens=2 * PAGE)
    config = DecodeConfig(block_size=8, max_new_tokens=40, attention="block")
    first, again = (llm.generate(numbers(1, PAGE), config) for _ in range(2))  # whole pages
    assert (first.token_ids, again.trace.rounds[0].cached) == (again.token_ids, PAGE)
    first, again = (llm.generate(numbers(1, 75), config) for _ in range(2))
    assert (first.token_ids, again.trace.rounds[0].cached) == (again.token_ids, 0)


def test_full_attention_reuses_only_when_asked_to() -> None:
    prompt = numbers(1, 75)
    exact, loose = load("dream_0"), load("dream_0", prefix_reuse="approximate")
    config = DecodeConfig(block_size=8, max_new_tokens=16)
    for llm, cached in ((exact, 0), (loose, 64)):
        llm.generate(prompt, config)
        assert llm.generate(prompt, config).trace.rounds[0].cached == cached
    with pytest.raises(LopaError, match="prefix_reuse must be exact, approximate, off"):
        load("dream_0", prefix_reuse="some")


def test_running_out_of_pages_is_waiting() -> None:
    llm = load("dream_0", cache_tokens=4 * PAGE)
    config = DecodeConfig(block_size=8, max_new_tokens=40)
    engine = Scheduler(llm.runner)
    sessions = [llm.session(numbers(seed, 40), config) for seed in range(5)]  # two pages each
    for session in sessions:
        engine.add(session)
    while engine.busy:
        engine.step()
        assert len(engine.running) <= 2
    roomy = load("dream_0")
    for session in sessions:
        assert session.output is not None
        alone = roomy.generate(session.trace.prompt_ids, config)
        assert session.output.token_ids == alone.token_ids
    with pytest.raises(CapacityError, match=r"needs capacity for 280 tokens.* holds 256"):
        engine.add(llm.session(numbers(0, 240), config))
    held = llm.stream(numbers(0, 120), config)
    next(held)
    with pytest.raises(CapacityError, match="other requests hold it"):
        llm.generate(numbers(1, 120), config)
    held.close()
    assert llm.generate(numbers(1, 40), config).token_ids == sessions[1].output.token_ids  # type: ignore[union-attr]


def test_what_is_staged_can_be_installed_elsewhere() -> None:
    """Two runners, one of which computes: both hold the same cache."""
    llm, other = load("dream_0"), load("dream_0")
    config = DecodeConfig(block_size=8, max_new_tokens=24, branches=2)
    prompt = numbers(3, 30)
    session = llm.session(prompt, config)
    capacity = session.capacity
    theirs = other.runner.open(config, capacity)
    assert theirs is not None
    slot = llm.runner.open(config, capacity)
    assert slot is not None
    while (plan := session.plan()) is not None:
        (stats,) = llm.runner.forward([(slot, plan)])
        assert stats is not None
        winner = session.choose(stats)
        if plan.commit:
            buffer = llm.runner.staged(slot, winner).clone()
            other.runner.install(theirs, plan, winner, buffer)
        llm.runner.commit([(slot, winner)])
        assert torch.equal(llm.runner.backend.carry[0], other.runner.backend.carry[0])
        session.record(0.0)
        if session.output is None:
            for mine, installed in (
                (llm.runner.kv_cache.keys, other.runner.kv_cache.keys),
                (llm.runner.kv_cache.values, other.runner.kv_cache.values),
            ):
                end = plan.start + plan.commit
                assert torch.equal(mine[:, :end], installed[:, :end])


def test_commit_needs_a_forward() -> None:
    llm = load("dream_0")
    slot = llm.runner.open(DecodeConfig(), 64)
    assert slot is not None
    with pytest.raises(RuntimeError, match="no forward to commit"):
        llm.runner.commit([(slot, 0)])
    plan = Plan(
        index=1,
        start=8,
        cached=8,
        commit=0,
        rows=np.full((1, 8), llm.config.mask_id),
        row_ends=np.array([16]),
        wanted=np.ones((1, 8), np.bool_),
        block_ids=None,
    )
    with pytest.raises(RuntimeError, match="no logits remembered for position 8"):
        llm.runner.forward([(slot, plan)])


def test_pages_are_reference_counted() -> None:
    cache = KVCache(load("dream_0").config, torch.device("cpu"), torch.float32, 3 * PAGE)
    pages = cache.alloc(2)
    assert pages is not None
    assert cache.alloc(2) is None
    cache.incref(pages[:1])
    cache.free(pages)
    assert cache.free_pages == 2
    with pytest.raises(RuntimeError, match="free already"):
        cache.free(pages[1:])
    with pytest.raises(RuntimeError, match="cannot be shared"):
        cache.incref(pages[1:])
    cache.free(pages[:1])
    assert cache.free_pages == 3


def test_the_least_recently_used_prefix_is_evicted_first() -> None:
    cache = KVCache(load("dream_0").config, torch.device("cpu"), torch.float32, 4 * PAGE)
    prefixes = PrefixCache(cache)
    pages = cache.alloc(4)
    assert pages is not None
    first = prefixes.add_page(None, [1] * PAGE, pages[0])
    prefixes.add_page(first, [2] * PAGE, pages[1])
    prefixes.add_whole([3] * 40, pages[2:], None)
    cache.free(pages)
    assert cache.free_pages == 0
    assert len(prefixes.find_pages([1] * PAGE + [2] * PAGE, 2 * PAGE)) == 2  # used just now
    prefixes.evict(1)
    assert prefixes.find_whole([3] * 40) is None
    assert cache.free_pages == 2
    prefixes.evict(3)  # the end of a chain before its beginning
    assert len(prefixes.find_pages([1] * PAGE + [2] * PAGE, 2 * PAGE)) == 1
    assert len(prefixes) == 1


def test_the_backend_is_warmed_up_before_the_first_request() -> None:
    warmed_up: list[int] = []

    class Recorded(TorchBackend):
        def warm_up(self, tokens: int) -> None:
            warmed_up.append(tokens)

    model = load("dream_0").model
    PagedRunner(model, 64, backend=Recorded)
    assert warmed_up == []
    PagedRunner(model, 64, backend=Recorded, warmup=96)
    assert warmed_up == [96]
    with pytest.raises(ConfigError, match="warmup must be between 0"):
        load("dream_0", warmup=-1)


def test_a_long_prompt_of_weights_that_are_not_numbers() -> None:
    llm = load("dream_0")
    llm.model.norm.weight.data.fill_(float("nan"))
    llm.runner = PagedRunner(llm.model, 512, prefill_tokens=4)
    with pytest.raises(LopaError, match="logits are not numbers"):
        llm.generate(numbers(2, 30), DecodeConfig(max_new_tokens=8, block_size=8))
