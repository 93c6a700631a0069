"""A soak: thousands of requests come, go and are dropped, and nothing is lost or mixed up."""

from __future__ import annotations

import random

import pytest
from ahead import make_eager

import goldens
from lopa import LLM, DecodeConfig
from lopa.engine.scheduler import Scheduler
from lopa.engine.session import Session

pytestmark = pytest.mark.engine

SETTINGS = [
    DecodeConfig(decoder="lopa", branches=3, block_size=8, max_new_tokens=16),
    DecodeConfig(decoder="lopa", branches=1, block_size=8, max_new_tokens=24, attention="block"),
    DecodeConfig(decoder="d2f", block_size=8, max_new_tokens=16, attention="block"),
    DecodeConfig(decoder="lopa", branches=2, block_size=8, max_new_tokens=16, temperature=0.8),
    DecodeConfig(decoder="vanilla", steps=5, max_new_tokens=10),
]


@pytest.mark.parametrize("requests", [1200, 300])  # the fewer with rounds begun ahead
def test_many_requests(requests: int) -> None:
    draw = random.Random(0)
    llm = LLM(goldens.MODELS / "dream_0", dtype="float32", device="cpu", cache_tokens=64 * 40)
    step = make_eager(llm) if requests == 300 else None
    runner = llm.runner
    runner.prefill_tokens = 100  # so that the longer prompts go by layers
    kinds = [
        ([draw.randrange(1, 150) for _ in range(draw.choice([1, 5, 30, 64, 65, 150]))], config)
        for config in SETTINGS
        for _ in range(30)
    ]
    expected = [llm.generate(prompt, config).token_ids for prompt, config in kinds]
    engine = Scheduler(runner, max_running=24, token_budget=1500)
    to_come = requests
    kind_of: dict[int, int] = {}
    alive: list[Session] = []
    finished = dropped = most = 0
    while to_come or engine.busy:
        for _ in range(min(to_come, draw.choice([0, 0, 1, 2, 12]))):
            kind = draw.randrange(len(kinds))
            session = llm.session(*kinds[kind])
            kind_of[id(session)] = kind
            alive.append(session)
            engine.add(session)
            to_come -= 1
        if alive and draw.random() < 0.15:
            victim = alive.pop(draw.randrange(len(alive)))
            engine.abort(victim)
            dropped += 1
        most = max(most, len(engine.running))
        for session, event in engine.step():
            if event.output is not None:
                assert event.output.token_ids == expected[kind_of[id(session)]]
                alive.remove(session)
                finished += 1
    assert finished + dropped == requests
    assert dropped > requests / 40
    assert step is None or step.finished > requests
    assert most > 8
    assert not alive
    runner.prefix_cache.clear()
    assert runner.kv_cache.free_pages == runner.kv_cache.total_pages
    assert not runner._slots
