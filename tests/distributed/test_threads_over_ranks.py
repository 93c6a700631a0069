"""Several threads, several engines, and forked children on one group of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from lopa.distributed.parallel_llm import ParallelLLM
from lopa.errors import LopaError, RankError
from threads import in_forked_child, in_threads

PROMPTS = [[5 + i, 7, 9 + i, 3] for i in range(8)]
SETTINGS: dict[str, Any] = {"branches": 2, "max_new_tokens": 16, "block_size": 8}


@pytest.fixture(scope="module")
def llm() -> Iterator[ParallelLLM]:
    """Loaded by a thread that has ended."""
    load = partial(ParallelLLM, "dummy:dream-tiny", device="cpu", cache_tokens=4096)
    (found,) = in_threads(load)
    with found:
        yield found


@pytest.fixture(scope="module")
def alone(llm: ParallelLLM) -> list[list[int]]:
    return [answer(llm, i) for i in range(len(PROMPTS))]


@pytest.fixture(autouse=True)
def no_rank_is_lost(llm: ParallelLLM) -> Iterator[None]:
    yield
    assert llm.supervisor.faults == []


def answer(llm: ParallelLLM, index: int) -> list[int]:
    return llm.generate(PROMPTS[index], **SETTINGS).token_ids


def last_of(stream: Iterator[Any]) -> list[int]:
    *_, event = stream
    assert event.output is not None
    return list(event.output.token_ids)


def test_threads_answer_as_one_does(llm: ParallelLLM, alone: list[list[int]]) -> None:
    found = in_threads(
        *(partial(answer, llm, i) for i in range(4)),
        lambda: last_of(llm.stream(PROMPTS[4], **SETTINGS)),
        lambda: last_of(llm.stream(PROMPTS[5], **SETTINGS)),
        lambda: next(llm.stream(PROMPTS[6], **SETTINGS)) and None,  # left half-way
    )
    assert found == [*alone[:6], None]


def test_a_batch_left_open_beside_a_call(llm: ParallelLLM, alone: list[list[int]]) -> None:
    """Its sessions end in the steps of the other engine."""
    batch = llm.generate_as_completed(PROMPTS[:3], **SETTINGS)
    done = dict([next(batch)])
    longer = {**SETTINGS, "max_new_tokens": 64, "threshold": 1.0, "early_stop": False}
    llm.generate(PROMPTS[3], **longer)
    done |= dict(batch)
    assert [done[i].token_ids for i in range(3)] == alone[:3]


def test_an_engine_beside_an_open_stream(llm: ParallelLLM, alone: list[list[int]]) -> None:
    stream = llm.stream(PROMPTS[0], **SETTINGS)
    next(stream)
    engine = llm.engine()
    assert engine.step() == []
    sessions = [llm.session(p, llm.decode_config(**SETTINGS)) for p in PROMPTS[1:3]]
    done = list(engine.run(iter(sessions)))
    assert len(done) == 2
    assert [s.output and s.output.token_ids for s in sessions] == alone[1:3]
    assert last_of(stream) == alone[0]
    assert not engine.busy


def test_a_forked_child_is_refused(llm: ParallelLLM, alone: list[list[int]]) -> None:
    stream = llm.stream(PROMPTS[0], **SETTINGS)
    next(stream)

    def child() -> str:
        for call in (lambda: answer(llm, 1), llm.engine, lambda: next(stream)):
            with pytest.raises(LopaError, match="load it in the child"):
                call()
        llm.close()  # as the end of a `with` block does
        return "refused"

    assert in_forked_child(child) == "refused"
    assert llm.supervisor.ranks_alive == 1
    assert answer(llm, 1) == alone[1]


def test_a_stream_that_is_open_when_the_ranks_are_ended() -> None:
    with ParallelLLM("dummy:dream-tiny", device="cpu", cache_tokens=4096) as llm:
        stream = llm.stream(PROMPTS[0], **SETTINGS)
        next(stream)
    with pytest.raises(RankError, match="load the model again"):
        next(stream)
    assert llm.supervisor.pids == []
