"""A job across restarts of its engine: nothing is said twice, and nothing is taken back."""

from __future__ import annotations

import asyncio
from typing import Any

from lopa.serving.api.request_state import Flow
from lopa.serving.jobs import Accepted, Advance, Failed, Finished, Job


class Silent:
    def advanced(self, flow: Flow, event: Advance) -> None: ...
    def ended(self, flow: Flow, event: Finished | Failed) -> None: ...


def advance(number: int, text: str) -> Advance:
    return Advance(round=number, text=text, filled=1, settled=1, seconds=0.1, rank=0, branches=1)


def after_a_restart(replay: list[str], *, stream: bool, said: str = "ab") -> tuple[Flow, list[Any]]:
    """A flow that had come so far, lost its engine, and sees these rounds; what it passed on."""

    async def run() -> tuple[Flow, list[Any]]:
        events: list[Any] = []
        job = Job(id="x", prompt="x", stream=stream)
        flow = Flow(job, 0, lambda i, e: events.append(e), Silent())
        flow.take(Accepted(prompt_tokens=1, max_tokens=9))
        for number, text in enumerate(said, start=1):
            flow.take(advance(number, text))
        flow.attempts = 1
        flow.again()
        flow.take(Accepted(prompt_tokens=1, max_tokens=9))
        for number, text in enumerate(replay, start=1):
            flow.take(advance(number, text))
        return flow, events

    return asyncio.run(run())


def test_rounds_that_were_seen_are_not_seen_again() -> None:
    for stream in (True, False):
        flow, events = after_a_restart(["a", "b", "c"], stream=stream)
        assert [type(event).__name__ for event in events] == ["Accepted"] + ["Advance"] * 3
        assert flow.text == "abc"
        assert flow.attempts == 0  # it got further: not the one that kills engines


def test_a_flow_that_had_not_begun_just_begins() -> None:
    for said in ("", "a"):
        flow, _ = after_a_restart(["a", "b", "c"], stream=True, said=said)
        assert flow.end is None
        assert flow.text == "abc"


def test_no_progress_keeps_the_suspicion() -> None:
    flow, _ = after_a_restart(["a", "b"], stream=True)
    assert flow.attempts == 1


def test_a_stream_that_takes_another_course_ends_in_an_error() -> None:
    flow, events = after_a_restart(["a", "X", "c"], stream=True)
    assert isinstance(flow.end, Failed)
    assert flow.end.kind == "lost"
    assert events[-1] is flow.end
    assert [event.text for event in events if isinstance(event, Advance)] == ["a", "b"]


def test_without_a_reader_the_later_course_counts() -> None:
    flow, _ = after_a_restart(["a", "X", "c"], stream=False)
    assert flow.end is None
    assert flow.text == "aXc"
