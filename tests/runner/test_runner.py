"""The cache is right: cached decoding equals recomputing everything, under block attention."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

import goldens
from lopa import LLM, DecodeConfig
from lopa.decoding.decoder import Decoder
from lopa.engine.scheduler import Scheduler
from lopa.engine.session import Session
from lopa.models.transformer import Transformer
from lopa.runner.base import SyncRunner
from lopa.runner.raw_logits import raw_logits
from lopa.runner.statistics import statistics
from lopa.types import Plan, Stats


class Uncached(SyncRunner):
    """A runner without a cache: every row from its first token on, one after another."""

    def __init__(self, model: Transformer, prompt: list[int]) -> None:
        self.model, self.prompt = model, prompt
        self.known = np.array([], np.int64)  # tokens before the window, as committed

    def check(self, capacity: int) -> None: ...

    def open(self, config: DecodeConfig, capacity: int, prompt: Sequence[int] = ()) -> int:
        self.config = config
        return 0

    def reused(self, slot: int) -> int:
        return 0

    def cost(self, plan: Plan) -> int:
        return plan.rows.size

    def close(self, slot: int) -> None: ...

    @property
    def kv_pages(self) -> None:
        return None

    def forward(self, plans: Sequence[tuple[int, Plan]]) -> list[Stats]:
        ((_, plan),) = plans
        self.plan = plan
        by_row = []
        for r, end in enumerate(plan.row_ends.tolist()):
            row = np.concatenate([self.known[: plan.start], plan.rows[r, : end - plan.start]])
            logits = raw_logits(
                self.model,
                row.tolist(),
                self.config.attention,
                len(self.prompt),
                self.config.block_size or 1,
            )
            if self.model.config.shift:
                logits = torch.cat([logits[:1], logits[:-1]])
            columns = np.flatnonzero(plan.wanted[r])
            positions = torch.from_numpy(columns + plan.start)
            found = statistics(logits[positions], positions, self.model.config.mask_id, self.config)
            by_row.append([x.numpy() for x in found])
        return [Stats(*map(np.concatenate, zip(*by_row, strict=True)))]

    def commit(self, winners: Sequence[tuple[int, int]]) -> None:
        for _, winner in winners:  # one at most
            row = self.plan.rows[winner]
            self.known = np.concatenate([self.known[: self.plan.start], row])


def decode_uncached(llm: LLM, prompt: list[int], config: DecodeConfig) -> Session:
    decoder = Decoder(
        config,
        prompt,
        mask_id=llm.config.mask_id,
        eos_ids=llm.config.eos_ids,
        shift=llm.config.shift,
        aligned=llm.config.trained_block is not None,
    )
    session = Session(decoder, None)
    for _ in Scheduler(Uncached(llm.model, prompt)).stream(session):
        pass
    return session


@pytest.mark.parametrize(
    ("model", "mask"),
    [("dream_0", 198), ("dream_5", 318), ("llada_a", 198), ("sdar_a", 198), ("fastdllm2_a", 198)],
)
@pytest.mark.parametrize(("branches", "temperature"), [(0, 0.0), (4, 0.7)])
def test_block_attention_needs_no_cache(
    model: str, mask: int, branches: int, temperature: float
) -> None:
    llm = LLM(goldens.MODELS / model, dtype="float32", device="cpu", mask_token_id=mask)
    config = DecodeConfig(
        attention="block",
        branches=branches,
        block_size=8,
        max_new_tokens=48,
        early_stop=False,
        temperature=temperature,
        seed=7,
    )
    for prompt in ([5, 6, 7], [9] * 20):
        cached = llm.generate(prompt, config)
        plain = decode_uncached(llm, prompt, config).output
        assert plain is not None
        assert cached.token_ids == plain.token_ids
        assert cached.rounds > 3  # so that blocks have gone to the cache
        for ours, theirs in zip(cached.trace.rounds, plain.trace.rounds, strict=True):
            assert ours.winner == theirs.winner
            assert [f.position for f in ours.fills] == [f.position for f in theirs.fills]


@pytest.mark.parametrize("window", ["canvas", "blocks"])
def test_windows_without_a_cache(window: str) -> None:
    llm = LLM(goldens.MODELS / "dream_3", dtype="float32", device="cpu")
    blocks = {"block_size": 8, "cache": "none"} if window == "blocks" else {}
    config = DecodeConfig(
        window=window,  # type: ignore[arg-type]
        max_new_tokens=32,
        branches=3,
        early_stop=False,
        **blocks,  # type: ignore[arg-type]
    )
    plain = decode_uncached(llm, [1, 2, 3, 4], config).output
    assert plain is not None
    assert llm.generate([1, 2, 3, 4], config).token_ids == plain.token_ids


def test_same_prompt_same_answer_whatever_else_is_asked() -> None:
    llm = LLM(goldens.MODELS / "dream_0", dtype="float32", device="cpu")
    config = DecodeConfig(max_new_tokens=32, block_size=8, temperature=0.8, seed=3)
    prompts = [[1, 2, 3], [4, 5, 6, 7], [1, 2, 3]]
    outputs = llm.generate(prompts, config)
    assert outputs[0].token_ids == outputs[2].token_ids
    assert outputs[1].token_ids == llm.generate(prompts[1], config).token_ids
    assert not llm.runner._slots


@pytest.mark.parametrize("attention", ["full", "block"])
def test_together_equals_alone(attention: str) -> None:
    llm = LLM(goldens.MODELS / "dream_0", dtype="float32", device="cpu")
    config = DecodeConfig(
        max_new_tokens=32,
        block_size=8,
        branches=4,
        attention=attention,  # type: ignore[arg-type]
    )
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 190, rng.integers(1, 30)).tolist() for _ in range(12)]
    alone = [llm.generate(prompt, config) for prompt in prompts]
    for size in (3, 8):
        found = dict(llm.generate_as_completed(prompts, config, max_running=size))
        for index, expected in enumerate(alone):
            assert found[index].token_ids == expected.token_ids
            assert found[index].rounds == expected.rounds
    assert not llm.runner._slots


def test_streams_and_aborts_leave_no_slot() -> None:
    llm = LLM("dummy:dream-tiny", device="cpu")
    config = DecodeConfig(max_new_tokens=64)
    stream = llm.stream("Hello", config)
    next(stream)
    stream.close()
    assert not llm.runner._slots
    events = list(llm.stream("Hello", config))
    output = llm.generate("Hello", config)
    assert events[-1].output is not None
    assert "".join(e.text for e in events) == output.text
    assert events[-1].output.token_ids == output.token_ids
    assert all(e.output is None for e in events[:-1])
