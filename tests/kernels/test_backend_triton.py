"""The Triton backend against the torch one: whole decodes, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from plain_far_attention import small_chunks
from small_automata import balanced, literal

import goldens
from lopa import LLM, DecodeConfig
from lopa.decoding.round_cost import RoundCost
from lopa.engine.scheduler import Scheduler
from lopa.kernels import prefix_attention
from lopa.kernels.quantize import quantize
from lopa.kernels.triton.kv_write import PendingKVWrites
from lopa.models import checkpoint, sdar_moe
from lopa.runner import graph_inputs
from lopa.runner.backend_triton import TritonBackend
from lopa.runner.batch import make_batch
from lopa.runner.graphs import GraphCache
from lopa.runner.kv_cache import PAGE
from lopa.runner.paged import PagedRunner
from lopa.types import Gap, Plan

pytestmark = [
    pytest.mark.engine,
    # Padding is uninitialized memory; nothing is read from it.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The interpreter runs them one by one, most of them for each token."""
    monkeypatch.setattr(graph_inputs, "PADDING", ((256, 8), *graph_inputs.PADDING[1:]))
    monkeypatch.setattr("lopa.kernels.triton.attention._SMS", 1)
    monkeypatch.setattr("lopa.kernels.triton.routing._ROWS", 32)
    monkeypatch.setattr("lopa.kernels.triton.routing._PAIRS", 128)
    monkeypatch.setattr("lopa.runner.graph_inputs.LayerSizes.writes", 8)
    monkeypatch.setattr("lopa.runner.graph_inputs.LayerSizes.carries", 2)
    graph_inputs.round_layers.cache_clear()
    yield
    graph_inputs.round_layers.cache_clear()


def load(name: str) -> LLM:
    return LLM(goldens.MODELS / name, dtype="float32", device="cpu", mask_token_id=198)


class FakeGraphs(GraphCache):
    """Graphs without a device: replaying one does its work again."""

    captured = 0

    def _capture(self, work: Callable[[], None]) -> Any:
        self.captured += 1
        return SimpleNamespace(replay=torch.inference_mode()(work))

    def wait(self) -> None: ...


class Replayed(TritonBackend):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.is_async = True
        (self.lane,) = self._lanes
        self.graphs = FakeGraphs(self.device)
        self.lane.graphs = self.graphs


class TwoLanes(Replayed):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._lanes.append(replace(self.lane, graphs=FakeGraphs(self.device)))
        self.launched: list[int] = []

    def launch(self, *args: Any) -> Any:
        self.launched.append(args[3])
        return super().launch(*args)


def compare(
    llm: LLM,
    prompts: list[list[int]],
    config: DecodeConfig,
    backend: type[TritonBackend] = TritonBackend,
    cost: RoundCost | None = None,
    **runner: Any,
) -> TritonBackend:
    plain = llm.generate(prompts, config)
    ours = PagedRunner(llm.model, 2048, backend=backend, **runner)
    llm.runner = ours
    engine = Scheduler(ours, cost=cost)
    sessions = [llm.session(prompt, config) for prompt in prompts]
    assert len(list(engine.run(iter(sessions)))) == len(prompts)
    for session, expected in zip(sessions, plain, strict=True):
        assert session.output is not None
        assert session.output.token_ids == expected.token_ids
        pairs = zip(session.output.trace.rounds, expected.trace.rounds, strict=True)
        for mine, theirs in pairs:
            assert mine.winner == theirs.winner
            scores = [[b.score for b in record.branches] for record in (mine, theirs)]
            np.testing.assert_allclose(*scores, atol=1e-4)
    ours.prefix_cache.clear()
    assert ours.kv_cache.free_pages == ours.kv_cache.total_pages
    assert isinstance(ours.backend, TritonBackend)
    return ours.backend


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("dream_0", {"branches": 2, "attention": "full", "ranking": "margin"}),
        ("dream_0", {"branches": 2, "attention": "block", "temperature": 0.8}),
        ("dream_0", {"branches": 2, "temperature": 0.8, "early_stop": False}),
        ("sdar_a", {"branches": 1, "attention": "block"}),
    ],
)
def test_decodes_the_same(name: str, options: dict[str, Any]) -> None:
    llm = load(name)
    size = llm.config.trained_block or 8
    config = llm.decode_config(
        decoder="lopa", block_size=size, max_new_tokens=size, max_rounds=3, **options
    )
    compare(llm, [[5, 6, 7], [9] * 13], config)


@pytest.mark.parametrize("name", ["llada21_a", "sdar-moe"])
def test_mixtures(tmp_path: Path, name: str) -> None:
    """With graphs, so with padding, two prompts, and blocks that are committed on the way."""
    if name == "sdar-moe":
        checkpoint.write_tiny(sdar_moe.FAMILY, tmp_path)
        llm = LLM(tmp_path, dtype="float32", device="cpu")
    else:
        llm = load(name)
    config = llm.decode_config(
        decoder="lopa", branches=1, block_size=4, max_new_tokens=8, max_rounds=3, threshold=0.01
    )
    compare(llm, [[5, 6, 7], [9] * 5], config, Replayed)


@pytest.mark.parametrize("attention", ["full", "block"])
def test_two_halves_in_turn(attention: str) -> None:
    """Five requests, two of them alike, with blocks that are committed on the way."""
    config = DecodeConfig(
        branches=1,
        block_size=4,
        max_new_tokens=12,
        threshold=0.02,
        attention=attention,
        early_stop=False,
    )  # type: ignore[arg-type]
    even = RoundCost(((1, 1e-4), (10_000, 1.0)), (1e-5,) * 5, in_halves=True)
    prompts = [[5, 6, 7], [9] * 13, [5, 6, 7], [8, 3] * 4, [4]]
    backend = compare(load("dream_0"), prompts, config, TwoLanes, even)
    assert isinstance(backend, TwoLanes)
    assert set(backend.launched) == {0, 1}
    assert backend.launched[1:5] == [0, 1, 0, 1]  # how long rounds are is known from the first


@pytest.mark.parametrize("backend", [TritonBackend, Replayed])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_that_have_to_fit(backend: type[TritonBackend], temperature: float) -> None:
    """Beside each other and one that has not: the answers of the torch backend."""
    llm = load("dream_0")
    vocab, eos = llm.config.vocab_size, llm.config.eos_ids
    config = llm.decode_config(
        branches=1, block_size=8, max_new_tokens=8, threshold=0.2, temperature=temperature
    )
    automata = [balanced(40, 41, range(50, 120), 2, vocab, eos), None, literal([5, 6], vocab, eos)]
    found = []
    for runner in (llm.runner, PagedRunner(llm.model, 2048, backend=backend)):
        sessions = [llm.session_from_ids([5, 6, 7], config, automaton=a) for a in automata]
        for _ in Scheduler(runner).run(iter(sessions)):
            pass
        found.append([session.output.token_ids for session in sessions if session.output])
    assert found[0] == found[1]


def test_gaps_have_graphs_too() -> None:
    """One length is chosen of two, beside an answer that has to fit."""
    llm = load("dream_0")
    vocab, eos = llm.config.vocab_size, llm.config.eos_ids
    config = llm.decode_config(branches=1, block_size=4, max_new_tokens=4, threshold=0.0)
    gaps = [Gap((2, 4), (9, 10, 11))]
    found = []
    ours = PagedRunner(llm.model, 2048, backend=Replayed)
    for runner in (llm.runner, ours):
        sessions = [
            llm.session_from_ids([5, 6, 7], config, gaps=gaps),
            llm.session_from_ids([5, 6, 7], config, automaton=literal([5, 6], vocab, eos)),
        ]
        for _ in Scheduler(runner).run(iter(sessions)):
            pass
        found.append([session.output.token_ids for session in sessions if session.output])
    assert found[0] == found[1]
    session = llm.session_from_ids([5, 6, 7], config, gaps=gaps)
    for _ in Scheduler(ours).run(iter([session])):
        pass
    assert session.output is not None
    assert session.output.token_ids == found[0][0]
    assert isinstance(ours.backend, Replayed)
    assert {sizes.never for sizes in ours.backend.graphs.heads} == {1}  # EOS


def test_settings_that_the_confidence_kernel_lacks() -> None:
    config = DecodeConfig(
        branches=1, block_size=8, max_new_tokens=8, temperature=0.7, top_p=0.9, max_rounds=3
    )
    compare(load("dream_0"), [[5, 6, 7]], config)


def test_a_long_prompt() -> None:
    config = DecodeConfig(branches=1, block_size=8, max_new_tokens=8, max_rounds=3)
    compare(load("dream_0"), [[5, 6] * 12, [7, 8, 9]], config, prefill_tokens=12)


@pytest.mark.parametrize(("backend", "attention"), [(TritonBackend, "block"), (Replayed, "full")])
def test_the_far_part_of_a_prefix(
    monkeypatch: pytest.MonkeyPatch, backend: type[TritonBackend], attention: Any
) -> None:
    """It grows by a chunk on the way."""
    small_chunks(monkeypatch, 1)
    monkeypatch.setattr("lopa.kernels.prefix_attention.is_faster", lambda *given: True)
    seen: list[int] = []
    attend_far = prefix_attention.attend_far

    def recorded(q: Any, k: Any, v: Any, pages: torch.Tensor) -> Any:
        seen.append(len(pages))
        return attend_far(q, k, v, pages)

    monkeypatch.setattr(prefix_attention, "attend_far", recorded)
    config = DecodeConfig(
        branches=1,
        block_size=4,
        max_new_tokens=12,
        threshold=0.0,
        attention=attention,
        early_stop=False,
    )
    found = compare(load("dream_0"), [[5, 6, 7, 8] * 31], config, backend)
    assert set(seen) == {1, 2}
    if isinstance(found, Replayed):
        assert {sizes.far for sizes in found.graphs.layers} == {0, PAGE, 2 * PAGE}


def test_int8() -> None:
    llm = load("dream_0")
    quantize(llm.model, "int8")
    config = DecodeConfig(branches=1, block_size=8, max_new_tokens=8, max_rounds=3)
    compare(llm, [[5, 6, 7]], config)


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.8}, {"temperature": 0.7, "top_p": 0.9}], ids=str
)
def test_rounds_of_graphs(options: dict[str, Any]) -> None:
    """Layers and head have graphs of their own sizes; the head only where the kernel has it all."""
    config = DecodeConfig(branches=1, block_size=4, max_new_tokens=8, max_rounds=4, **options)
    backend = compare(load("dream_0"), [[5, 6, 7], [9] * 13], config, Replayed)
    assert isinstance(backend, Replayed)
    assert backend.graphs.layers
    assert bool(backend.graphs.heads) == ("top_p" not in options)
    assert {sizes.sampling for sizes in backend.graphs.heads} <= {"temperature" in options}


def test_pending_writes_are_done_before_the_next_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt is written at once, blocks by the next round, of any session."""
    llm = load("dream_0")
    fast, slow = (
        DecodeConfig(
            branches=1,
            block_size=8,
            max_new_tokens=24,
            threshold=threshold,
            attention="block",
            max_rounds=5,
        )
        for threshold in (0.0, 0.5)
    )
    known = [5, 6, 7, 8] * (PAGE // 4)  # whole pages, so that none is copied
    asked = [(known, fast), (known, slow)]
    expected = [llm.generate(prompt, config).token_ids for prompt, config in asked]
    runner = PagedRunner(llm.model, 4 * PAGE, backend=Replayed)
    llm.runner = runner
    written: list[int] = []
    write_kv = runner.backend._write_kv  # type: ignore[attr-defined]

    def recorded(lane: Any, writes: PendingKVWrites[torch.Tensor]) -> None:
        written.append(int((writes.source >= 0).sum()))
        write_kv(lane, writes)

    monkeypatch.setattr(runner.backend, "_write_kv", recorded)
    outputs = [llm.generate(prompt, config) for prompt, config in asked]
    assert [output.token_ids for output in outputs] == expected
    assert written[:2] == [0, PAGE]  # nothing, and the prompt
    assert written.count(8) >= 2
    assert [output.trace.rounds[0].cached for output in outputs] == [0, PAGE]


def test_what_is_staged_can_be_installed_elsewhere() -> None:
    """By a runner that leaves its own commits to the next graph, as ranks of a group do."""
    llm = load("dream_0")
    ours, theirs = (PagedRunner(llm.model, 2 * PAGE, backend=Replayed) for _ in range(2))
    llm.runner = ours
    config = DecodeConfig(
        branches=1, block_size=8, max_new_tokens=24, threshold=0.0, attention="full"
    )
    session = llm.session([5, 6, 7], config)
    slot = theirs.open(config, session.capacity)
    assert slot is not None
    commits = cached = 0
    own = ours.open(config, session.capacity)
    assert own is not None
    while (plan := session.plan()) is not None:
        (stats,) = ours.forward([(own, plan)])
        assert stats is not None
        winner = session.choose(stats)
        if plan.commit:
            commits, cached = commits + 1, plan.start + plan.commit
            theirs.install(slot, plan, winner, ours.staged(own, winner))
        ours.commit([(own, winner)])
        session.record(0.0)
    assert commits > 1
    ours.backend.flush()
    for mine, installed in (
        (ours.kv_cache.keys, theirs.kv_cache.keys),
        (ours.kv_cache.values, theirs.kv_cache.values),
    ):
        assert torch.equal(mine[:, :cached], installed[:, :cached])
    assert torch.equal(ours.backend.carry[0], theirs.backend.carry[0])


def test_only_the_last_launch_can_be_waited_for() -> None:
    """Its buffers hold the result of another one."""
    llm = load("dream_0")
    runner = PagedRunner(llm.model, 2 * PAGE, backend=Replayed)
    slot = runner.open(DecodeConfig(), 16)
    assert slot is not None
    tokens, wanted = np.full((1, 4), 5), np.ones((1, 4), np.bool_)
    plan = Plan(1, 0, 0, 0, tokens, np.array([4]), wanted, None)
    given = make_batch([(slot, plan)], True), [runner._slots[slot].table], [DecodeConfig()]
    first, second = (runner.backend.launch(*given) for _ in range(2))
    with pytest.raises(RuntimeError, match="another forward was launched since"):
        first.wait()
    assert len(second.wait()[0]) == 4


def test_graphs_are_dropped_and_captured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lopa.runner.graphs._MOST_GRAPHS", 1)
    config = DecodeConfig(branches=1, block_size=4, max_new_tokens=8, max_rounds=4)
    backend = compare(load("dream_0"), [[5, 6, 7], [9] * 40], config, Replayed)
    assert isinstance(backend, Replayed)
    assert len(backend.graphs.layers) == len(backend.graphs.heads) == 1


def test_after_a_warm_up_nothing_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_inputs, "PADDING", ((256, 16), *graph_inputs.PADDING[1:]))
    config = DecodeConfig(branches=1, block_size=8, max_new_tokens=8, max_rounds=3)
    captured: list[int] = []

    class Recorded(Replayed):
        def warm_up(self, tokens: int) -> None:
            super().warm_up(tokens)
            captured.append(self.graphs.captured)

    backend = compare(load("dream_0"), [[5, 6, 7]], config, Recorded, warmup=32)
    assert isinstance(backend, Recorded)
    assert captured == [backend.graphs.captured]
    assert captured[0] > 2
