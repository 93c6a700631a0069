"""Rounds begun ahead of their step: the same answers, nothing done in vain, nothing mixed up."""

from __future__ import annotations

import random

import pytest
from ahead import Eager, make_eager

from lopa import LLM, DecodeConfig, Output
from lopa.engine.scheduler import Scheduler

SETTINGS = [
    DecodeConfig(decoder="lopa", branches=3, block_size=8, max_new_tokens=24),
    DecodeConfig(decoder="d2f", block_size=8, max_new_tokens=16, attention="block"),
    DecodeConfig(decoder="lopa", branches=2, block_size=8, max_new_tokens=16, top_p=0.9,
                 temperature=0.7),
]  # fmt: skip
PROMPTS = [[random.Random(seed).randrange(1, 200) for _ in range(5 + seed)] for seed in range(6)]


@pytest.fixture(scope="module")
def plain() -> LLM:
    return LLM("dummy:dream-tiny", device="cpu", dtype="float32")


@pytest.fixture
def eager() -> tuple[LLM, Eager]:
    llm = LLM("dummy:dream-tiny", device="cpu", dtype="float32")
    return llm, make_eager(llm)


def config_of(number: int) -> DecodeConfig:
    return SETTINGS[number % len(SETTINGS)]


def told(output: Output) -> list[object]:
    """Text, tokens, and what each round filled; probabilities depend a little on the company."""
    return [
        output.text,
        output.token_ids,
        [(r.winner, [(f.position, f.token) for f in r.fills]) for r in output.trace.rounds],
    ]


def same(one: Output | None, other: Output | None) -> bool:
    return one is not None and other is not None and told(one) == told(other)


@pytest.mark.parametrize("number", range(3))
def test_one_alone(plain: LLM, eager: tuple[LLM, Eager], number: int) -> None:
    llm, step = eager
    output = llm.generate(PROMPTS[number], config_of(number))
    assert same(output, plain.generate(PROMPTS[number], config_of(number)))
    assert step.forwards == output.rounds  # nothing in vain
    assert step.begun == step.finished == output.rounds
    assert output.seconds == pytest.approx(sum(r.seconds for r in output.trace.rounds))


def test_many_at_once_and_no_place_is_empty(plain: LLM, eager: tuple[LLM, Eager]) -> None:
    llm, step = eager
    engine = Scheduler(llm.runner, max_running=2)
    waiting = [llm.session(p, config_of(i)) for i, p in enumerate(PROMPTS)]
    for session in waiting:
        engine.add(session)
    together = []
    while engine.busy:
        together.append(len(engine.step()))
    assert all(same(s.output, plain.generate(PROMPTS[i], config_of(i)))
               for i, s in enumerate(waiting))  # fmt: skip
    assert step.forwards == len(together)
    assert step.finished == len(together)
    # The line moves up as soon as one has finished: only the very last rounds have one row alone.
    last = max(i for i, count in enumerate(together) if count == 2)
    assert set(together[: last + 1]) == {2}


def test_run_keeps_its_places_filled(eager: tuple[LLM, Eager]) -> None:
    llm, step = eager
    rounds = [llm.generate(prompt, SETTINGS[0]).rounds for prompt in PROMPTS[:4]]
    step.forwards = 0
    done = list(llm.generate_as_completed(PROMPTS[:4], SETTINGS[0], max_running=1))
    assert len(done) == 4
    assert step.forwards == sum(rounds)


def test_streams_in_turn_lose_work_and_nothing_else(plain: LLM, eager: tuple[LLM, Eager]) -> None:
    llm, step = eager
    streams = [llm.stream(PROMPTS[i], config_of(i)) for i in range(3)]
    outputs: list[Output | None] = [None] * 3
    while None in outputs:
        for i, stream in enumerate(streams):
            event = next(stream, None)
            outputs[i] = outputs[i] if event is None else event.output
    for i, output in enumerate(outputs):
        assert same(output, plain.generate(PROMPTS[i], config_of(i)))
    assert step.finished < step.begun


@pytest.mark.parametrize("leaves", [0, 1])
def test_one_that_is_dropped_meanwhile(plain: LLM, eager: tuple[LLM, Eager], leaves: int) -> None:
    llm, _ = eager
    engine = Scheduler(llm.runner)
    sessions = [llm.session(PROMPTS[i], config_of(i)) for i in range(2)]
    for session in sessions:
        engine.add(session)
    engine.step()
    engine.abort(sessions[leaves])
    late = llm.session(PROMPTS[2], config_of(2))  # takes the slot that has become free
    engine.add(late)
    while engine.busy:
        engine.step()
    stays = 1 - leaves
    assert same(sessions[stays].output, plain.generate(PROMPTS[stays], config_of(stays)))
    assert same(late.output, plain.generate(PROMPTS[2], config_of(2)))
    assert sessions[leaves].output is None


@pytest.mark.parametrize("limit", [None, 5, 13])
def test_no_round_is_begun_behind_the_end(
    plain: LLM, eager: tuple[LLM, Eager], limit: int | None
) -> None:
    llm, step = eager
    whole = plain.generate(PROMPTS[0], SETTINGS[0]).text
    stop = whole[len(whole) // 2] if limit is None else ()
    config = SETTINGS[0].changed(stop=tuple(stop), max_new_tokens=limit or 24)
    output = llm.generate(PROMPTS[0], config)
    assert output.finish == ("stop" if limit is None else "length")
    assert same(output, plain.generate(PROMPTS[0], config))
    assert step.forwards == output.rounds
