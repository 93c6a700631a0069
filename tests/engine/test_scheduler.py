"""The engine: whose turn it is, what is dropped, and that company never changes an answer."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Literal

import pytest

from lopa import LLM, DecodeConfig
from lopa.engine.scheduler import Scheduler
from lopa.engine.session import Session
from lopa.errors import LopaError

SETTINGS = [
    DecodeConfig(decoder="lopa", branches=3, block_size=8, max_new_tokens=24),
    DecodeConfig(decoder="d2f", block_size=4, max_new_tokens=16, attention="block"),
    DecodeConfig(decoder="vanilla", steps=6, max_new_tokens=8),
    DecodeConfig(decoder="lopa", branches=2, block_size=8, max_new_tokens=16, temperature=0.7),
]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("dummy:dream-tiny", device="cpu", dtype="float32")


def make_prompt(seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(200) for _ in range(draw.randrange(1, 40))]


def sessions(llm: LLM, count: int) -> Iterator[Session]:
    for seed in range(count):
        yield llm.session(make_prompt(seed), SETTINGS[seed % len(SETTINGS)])


@pytest.mark.parametrize(("max_running", "token_budget"), [(3, 100), (32, 8192)])
def test_company_does_not_change_answers(llm: LLM, max_running: int, token_budget: int) -> None:
    engine = Scheduler(llm.runner, max_running=max_running, token_budget=token_budget)
    done = {tuple(s.trace.prompt_ids): s.output for s in engine.run(sessions(llm, 8))}
    assert len(done) == 8
    for seed in range(8):
        alone = llm.generate(make_prompt(seed), SETTINGS[seed % len(SETTINGS)])
        together = done[tuple(make_prompt(seed))]
        assert together is not None
        assert together.token_ids == alone.token_ids
        assert together.rounds == alone.rounds


def test_sessions_take_turns_under_a_small_budget(llm: LLM) -> None:
    engine = Scheduler(llm.runner, token_budget=1)  # one session a round
    for session in sessions(llm, 3):
        engine.add(session)
    in_line = [id(session) for session in engine.waiting]
    order = [id(session) for _ in range(6) for session, _ in engine.step()]
    engine.close()
    assert order == in_line * 2


def test_a_newcomer_goes_first(llm: LLM) -> None:
    engine = Scheduler(llm.runner, token_budget=1)
    first, second = sessions(llm, 2)
    engine.add(first)
    engine.step()
    engine.add(second)
    assert [session for session, _ in engine.step()] == [second]
    engine.close()


def test_abort_at_any_time_frees_the_slot(llm: LLM) -> None:
    engine = Scheduler(llm.runner, max_running=2)
    running, waiting, dropped = sessions(llm, 3)
    for session in (dropped, running, waiting):
        engine.add(session)
    engine.step()
    assert list(engine.waiting) == [waiting]
    engine.abort(dropped)
    engine.step()
    assert not engine.waiting
    engine.abort(waiting)
    while engine.busy:
        engine.step()
    assert running.output is not None
    assert dropped.output is None
    assert dropped.slot == waiting.slot == -1
    engine.abort(running)  # done already: nothing happens


def test_leaving_the_loop_frees_everything(llm: LLM) -> None:
    engine = Scheduler(llm.runner, max_running=4)
    running = engine.run(sessions(llm, 8))
    next(running)
    running.close()
    assert not engine.busy


def test_bad_limits(llm: LLM) -> None:
    with pytest.raises(LopaError, match="token_budget must be at least 1"):
        Scheduler(llm.runner, token_budget=0)


@pytest.mark.parametrize(
    ("reuse", "attention", "is_written"),
    [("exact", "full", False), ("exact", "block", False), ("approximate", "full", True)],
)
def test_what_nobody_shares_is_not_written_at_the_end(
    reuse: Literal["exact", "approximate"],
    attention: str,
    is_written: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = LLM("dummy:dream-tiny", device="cpu", dtype="float32", prefix_reuse=reuse)
    committed: list[tuple[int, int]] = []
    commit = llm.runner.commit

    def noted(winners: Sequence[tuple[int, int]]) -> None:
        committed.extend(winners)
        commit(winners)

    monkeypatch.setattr(llm.runner, "commit", noted)
    output = llm.generate(make_prompt(1), SETTINGS[0].changed(attention=attention))
    assert len(committed) == output.rounds - (not is_written)
