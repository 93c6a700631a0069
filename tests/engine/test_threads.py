"""Several threads, several engines, and forked children on one model."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from lopa import LLM, LopaError
from lopa.decoding.round_cost import EVERY_ROUND_THE_SAME
from lopa.engine import cost_measurement
from lopa.engine.engine_lock import EngineLock
from threads import PATIENCE, in_forked_child, in_threads

PROMPTS = [[5 + i, 7, 9 + i, 3] for i in range(16)]
SETTINGS: dict[str, Any] = {"branches": 3, "max_new_tokens": 24, "block_size": 8}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("dummy:dream-tiny", device="cpu", cache_tokens=4096)


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[list[int]]:
    return [llm.generate(prompt, **SETTINGS).token_ids for prompt in PROMPTS]


@pytest.fixture(autouse=True)
def every_page_is_freed(llm: LLM) -> Iterator[None]:
    yield
    assert llm.runner.kv_pages[0] == 0


def answer(llm: LLM, index: int) -> list[int]:
    return llm.generate(PROMPTS[index], **SETTINGS).token_ids


def last_of(stream: Iterator[Any]) -> list[int]:
    *_, event = stream
    assert event.output is not None
    return list(event.output.token_ids)


def patch_forward(llm: LLM, monkeypatch: pytest.MonkeyPatch, first: Callable[[], object]) -> None:
    """Have `first` called in the midst of every round."""
    forward = llm.runner.forward

    def patched(plans: Any, lane: int) -> Any:
        first()
        return forward(plans, lane)

    monkeypatch.setattr(llm.runner, "forward", patched)


def test_four_threads_answer_as_one_does(llm: LLM, alone: list[list[int]]) -> None:
    def work(first: int) -> list[list[int]]:
        return [answer(llm, i) for i in range(first, first + 4)]

    found = in_threads(*(partial(work, first) for first in range(0, 16, 4)))
    assert found == [alone[first : first + 4] for first in range(0, 16, 4)]


def test_streams_batches_and_calls_in_threads(llm: LLM, alone: list[list[int]]) -> None:
    def batch() -> list[list[int]]:
        done = dict(llm.generate_as_completed(PROMPTS[:3], max_running=2, **SETTINGS))
        return [done[i].token_ids for i in range(3)]

    found = in_threads(
        lambda: last_of(llm.stream(PROMPTS[0], **SETTINGS)),
        lambda: last_of(llm.stream(PROMPTS[1], **SETTINGS)),
        lambda: answer(llm, 2),
        batch,
        lambda: llm.forward(PROMPTS[0]),
    )
    assert found[:4] == [alone[0], alone[1], alone[2], alone[:3]]
    torch.testing.assert_close(found[4], llm.forward(PROMPTS[0]))


def test_calls_between_the_rounds_of_a_stream(llm: LLM, alone: list[list[int]]) -> None:
    stream = llm.stream(PROMPTS[0], **SETTINGS)
    next(stream)
    assert answer(llm, 1) == alone[1]
    assert in_threads(lambda: answer(llm, 2)) == [alone[2]]
    assert last_of(stream) == alone[0]


def test_long_prompts_of_two_engines(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    """The second is not to wait for the first, whose engine makes no step meanwhile."""
    monkeypatch.setattr(llm.runner, "prefill_tokens", 64)
    one, two = ([3 + (i + begin) % 50 for i in range(200)] for begin in (0, 7))
    settings = {"decoder": "lopa", "max_new_tokens": 8, "block_size": 8, "branches": 1}
    want = [llm.generate(prompt, **settings).token_ids for prompt in (one, two)]
    engine = llm.engine()
    session = llm.session(one, llm.decode_config(**settings))
    engine.add(session)
    assert engine.step() == []  # a few layers of the prompt
    assert in_threads(lambda: llm.generate(two, **settings).token_ids) == [want[1]]
    while engine.busy:
        engine.step()
    assert session.output is not None
    assert session.output.token_ids == want[0]


def test_a_stream_left_half_way(llm: LLM, alone: list[list[int]]) -> None:
    def leave() -> None:
        next(llm.stream(PROMPTS[0], **SETTINGS))

    found = in_threads(leave, lambda: answer(llm, 1), leave, lambda: answer(llm, 2))
    assert found == [None, alone[1], None, alone[2]]
    answer(llm, 0)  # whatever is left is dropped before the next round


def test_closing_a_stream_waits_for_no_call(llm: LLM) -> None:
    stream = llm.stream(PROMPTS[0], **SETTINGS)
    next(stream)
    with llm._lock.held():  # as a call in this thread does
        assert in_threads(stream.close) == [None]
        assert llm.runner.kv_pages[0] > 0
        answer(llm, 1)


def test_a_stream_collected_in_the_midst_of_a_round(
    llm: LLM, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = [llm.stream(PROMPTS[i], **SETTINGS) for i in (1, 2)]
    for stream in streams:
        next(stream)
    del stream
    pages: list[int] = []

    def collect() -> None:
        streams.clear()
        pages.append(llm.runner.kv_pages[0])

    patch_forward(llm, monkeypatch, collect)
    assert answer(llm, 0) == alone[0]
    assert pages[0] > pages[1]  # freed between the rounds


@pytest.mark.parametrize("kind", [KeyboardInterrupt, LopaError, RuntimeError])
def test_an_error_in_one_thread(
    llm: LLM, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]
) -> None:
    stream = llm.stream(PROMPTS[4], **SETTINGS)
    next(stream)
    failing: list[threading.Thread] = []

    def fail() -> None:
        if threading.current_thread() in failing:
            raise kind("on purpose")

    patch_forward(llm, monkeypatch, fail)

    def broken() -> list[int]:
        failing.append(threading.current_thread())
        return answer(llm, 0)

    works = [broken, *(partial(answer, llm, i) for i in (1, 2, 3))]
    error, *found = in_threads(*works)
    assert isinstance(error, kind)
    assert found == alone[1:4]
    assert last_of(stream) == alone[4]


def test_decoding_within_a_round_is_refused(
    llm: LLM, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def nested() -> None:
        with pytest.raises(LopaError, match="a round is under way"):
            answer(llm, 1)

    patch_forward(llm, monkeypatch, nested)
    assert answer(llm, 0) == alone[0]


def test_threads_measure_the_cost_of_rounds_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []
    both = threading.Barrier(2)

    def measure(*_: object) -> object:
        measured.append(1)
        return EVERY_ROUND_THE_SAME

    def ask() -> object:
        both.wait(PATIENCE)
        return llm.round_cost

    monkeypatch.setattr(cost_measurement, "measure", measure)
    monkeypatch.setattr(llm, "_round_cost", None)
    assert in_threads(ask, ask) == [EVERY_ROUND_THE_SAME] * 2
    assert measured == [1]


def test_a_forked_child_is_refused(llm: LLM, alone: list[list[int]]) -> None:
    stream = llm.stream(PROMPTS[0], **SETTINGS)
    next(stream)
    engine = llm.engine()
    engine.add(llm.session(PROMPTS[1], llm.decode_config(**SETTINGS)))
    calls: list[Callable[[], object]] = [
        lambda: answer(llm, 0),
        lambda: llm.stream(PROMPTS[0]),
        lambda: llm.generate_as_completed(PROMPTS),
        lambda: next(stream),
        lambda: llm.forward(PROMPTS[0]),
        llm.engine,
        engine.step,
    ]

    def child() -> str:
        for call in calls:
            with pytest.raises(LopaError, match=r"^[^\n]*load it in the child[^\n]*$"):
                call()
        engine.close()
        return "all refused"

    def in_a_call() -> str:  # of another thread, which the child does not have
        held, over = threading.Event(), threading.Event()

        def hold() -> None:
            with llm._lock.held():
                held.set()
                over.wait(PATIENCE)

        thread = threading.Thread(target=hold, daemon=True)
        thread.start()
        held.wait(PATIENCE)
        try:
            return in_forked_child(child)
        finally:
            over.set()
            thread.join(PATIENCE)

    assert in_forked_child(child) == "all refused"
    assert in_a_call() == "all refused"
    engine.close()
    stream.close()
    assert answer(llm, 0) == alone[0]


def test_a_copy_has_a_lock_of_its_own() -> None:
    lock = EngineLock()
    with lock.held():
        other = copy.deepcopy(lock)
        assert in_threads(lambda: other.run(lambda: 1)) == [1]
