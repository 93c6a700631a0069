"""The fused step against the plain one: whole decodes, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import goldens
from lopa import LLM, DecodeConfig
from lopa.engine.scheduler import Scheduler
from lopa.kernels.quantize import quantize
from lopa.runner import graph_inputs as layout
from lopa.runner.backend_triton import FusedStep
from lopa.runner.kv_cache import PAGE
from lopa.runner.paged import PagedRunner

pytestmark = [
    pytest.mark.engine,
    # Padding holds whatever was in memory; nothing is read from it.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs them one by one."""
    monkeypatch.setattr("lopa.kernels.triton.attention._PROCESSORS", 1)
    monkeypatch.setattr("lopa.runner.graph_inputs.MOVES", 8)
    monkeypatch.setattr("lopa.runner.graph_inputs.CARRIES", 2)


def load(name: str) -> LLM:
    return LLM(goldens.MODELS / name, dtype="float32", device="cpu", mask_token_id=198)


class Replayed(FusedStep):
    """Graphs without a device: to replay one is to do its work again."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.graphs = self.works_alone = True
        self.captured = 0

    def _capture(self, work: Callable[[], Iterator[None]]) -> Any:
        """Two, whether the work has two parts or one."""
        self.captured += 1
        running: list[Iterator[None]] = []

        def first() -> None:
            running[:] = [work()]
            next(running[0], None)

        def rest() -> None:
            assert next(running.pop(), "done") == "done"

        return [SimpleNamespace(replay=torch.inference_mode()(part)) for part in (first, rest)]

    def _wait(self) -> None:
        self._begun = None


def compare(
    llm: LLM,
    prompts: list[list[int]],
    config: DecodeConfig,
    step: type[FusedStep] = FusedStep,
    **runner: Any,
) -> FusedStep:
    plain = llm.generate(prompts, config)
    fused = PagedRunner(llm.model, 2048, step=step, **runner)
    llm.runner = fused
    engine = Scheduler(fused)
    sessions = [llm.session(prompt, config) for prompt in prompts]
    assert len(list(engine.run(iter(sessions)))) == len(prompts)
    for session, expected in zip(sessions, plain, strict=True):
        assert session.output is not None
        assert session.output.token_ids == expected.token_ids
        pairs = zip(session.output.trace.rounds, expected.trace.rounds, strict=True)
        for ours, theirs in pairs:
            assert ours.winner == theirs.winner
            scores = [[b.score for b in record.branches] for record in (ours, theirs)]
            np.testing.assert_allclose(*scores, atol=1e-4)
    fused.prefixes.clear()
    assert fused.pages.free == fused.pages.count
    assert isinstance(fused.step, FusedStep)
    return fused.step


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("dream_0", {"branches": 2, "attention": "full", "ranking": "margin"}),
        ("dream_0", {"branches": 2, "attention": "block", "temperature": 0.8}),
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


def test_what_the_kernel_does_not_do_is_done_outside() -> None:
    config = DecodeConfig(
        branches=1, block_size=8, max_new_tokens=8, temperature=0.7, top_p=0.9, max_rounds=3
    )
    compare(load("dream_0"), [[5, 6, 7]], config)


def test_a_long_prompt() -> None:
    config = DecodeConfig(branches=1, block_size=8, max_new_tokens=8, max_rounds=3)
    compare(load("dream_0"), [[5, 6] * 12, [7, 8, 9]], config, prefill_tokens=12)


def test_int8() -> None:
    llm = load("dream_0")
    quantize(llm.model, "int8")
    config = DecodeConfig(branches=1, block_size=8, max_new_tokens=8, max_rounds=3)
    compare(llm, [[5, 6, 7]], config)


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.8}, {"temperature": 0.7, "top_p": 0.9}], ids=str
)
def test_rounds_of_graphs(options: dict[str, Any]) -> None:
    """The layers' and the head's are kept by sizes of their own; the head's where it is fused."""
    config = DecodeConfig(branches=2, block_size=8, max_new_tokens=16, max_rounds=4, **options)
    step = compare(load("dream_0"), [[5, 6, 7], [9] * 13], config, Replayed)
    assert isinstance(step, Replayed)
    assert step._bodies
    assert bool(step._heads) == ("top_p" not in options)
    assert {sizes.drawing for sizes in step._heads} <= {"temperature" in options}


def test_what_was_committed_is_there_for_whoever_comes_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A prompt is settled at once, blocks with the next round, whoever's that is."""
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
    runner = PagedRunner(llm.model, 4 * PAGE, step=Replayed)
    llm.runner = runner
    settled: list[int] = []
    settle = runner.step._settle  # type: ignore[attr-defined]

    def noted(moves: layout.Moves[torch.Tensor]) -> None:
        settled.append(int((moves.source >= 0).sum()))
        settle(moves)

    monkeypatch.setattr(runner.step, "_settle", noted)
    outputs = [llm.generate(prompt, config) for prompt, config in asked]
    assert [output.token_ids for output in outputs] == expected
    assert settled[:2] == [0, PAGE]  # nothing, and the prompt
    assert settled.count(8) >= 2
    assert [output.trace.rounds[0].cached for output in outputs] == [0, PAGE]


def test_what_is_staged_can_be_installed_elsewhere() -> None:
    """By a runner that leaves its own commits to the next graph, as ranks of a group do."""
    llm = load("dream_0")
    ours, theirs = (PagedRunner(llm.model, 2 * PAGE, step=Replayed) for _ in range(2))
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
    ours.step.settle()
    for mine, installed in (
        (ours.pages.keys, theirs.pages.keys),
        (ours.pages.values, theirs.pages.values),
    ):
        assert torch.equal(mine[:, :cached], installed[:, :cached])
    assert torch.equal(ours.step.carry[0], theirs.step.carry[0])


def test_graphs_are_dropped_and_captured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lopa.runner.backend_triton._MOST_GRAPHS", 1)
    config = DecodeConfig(branches=1, block_size=8, max_new_tokens=16, max_rounds=4)
    step = compare(load("dream_0"), [[5, 6, 7], [9] * 40], config, Replayed)
    assert len(step._bodies) == len(step._heads) == 1


def test_after_a_warm_up_nothing_is_captured() -> None:
    config = DecodeConfig(branches=1, block_size=8, max_new_tokens=8, max_rounds=3)
    made: list[int] = []

    class Noted(Replayed):
        def warm_up(self, tokens: int) -> None:
            super().warm_up(tokens)
            made.append(self.captured)

    step = compare(load("dream_0"), [[5, 6, 7]], config, Noted, warmup=64)
    assert isinstance(step, Noted)
    assert made == [step.captured]
    assert made[0] > 2


def test_what_is_warmed_up_is_what_comes() -> None:
    llm = load("dream_0")
    step = FusedStep(llm.model, llm.runner.pages)  # type: ignore[attr-defined]
    bodies, heads = map(set, step._common_sizes(700))
    generator = np.random.default_rng(0)
    for _ in range(300):
        tokens = int(generator.integers(1, 701))
        rows, wanted = generator.integers(1, [min(16, tokens) + 1, tokens + 1]).tolist()
        assert layout.rounded_body(tokens, rows, step._group) in bodies
        assert layout.HeadSizes(layout.rounded_head(wanted), False) in heads
    assert len(bodies) + len(heads) < 40
