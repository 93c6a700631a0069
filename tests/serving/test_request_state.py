"""A job across restarts of its engine: no event is reported twice, and none is taken back."""

from __future__ import annotations

import asyncio
from typing import Any

from lopa.serving.api.request_state import NullObserver, RequestState
from lopa.serving.jobs import Accepted, Advance, Failed, Job


def advance(number: int, text: str) -> Advance:
    return Advance(round=number, text=text, filled=1, seconds=0.1, winner_rank=0, branches=1)


def after_a_restart(
    replay: list[str], *, stream: bool, before: str = "ab"
) -> tuple[RequestState, list[Any]]:
    """A request with rounds `before` its engine was lost and `replay` after it; its events."""

    async def run() -> tuple[RequestState, list[Any]]:
        events: list[Any] = []
        job = Job(id="x", prompt="x", stream=stream)
        request = RequestState(job, 0, lambda i, e: events.append(e), NullObserver())
        request.handle(Accepted(prompt_tokens=1, max_tokens=9))
        for number, text in enumerate(before, start=1):
            request.handle(advance(number, text))
        request.attempts = 1
        request.restart()
        request.handle(Accepted(prompt_tokens=1, max_tokens=9))
        for number, text in enumerate(replay, start=1):
            request.handle(advance(number, text))
        return request, events

    return asyncio.run(run())


def test_reported_rounds_are_not_reported_again() -> None:
    for stream in (True, False):
        request, events = after_a_restart(["a", "b", "c"], stream=stream)
        assert [type(event).__name__ for event in events] == ["Accepted"] + ["Advance"] * 3
        assert request.text == "abc"
        assert request.attempts == 0  # there was progress


def test_rounds_are_run_again_with_the_branches_they_had() -> None:
    async def run() -> list[list[int]]:
        job = Job(id="x", prompt="x", stream=True)
        request = RequestState(job, 0, lambda i, e: None, NullObserver())
        request.handle(Accepted(prompt_tokens=1, max_tokens=9))
        found = []
        for begun, text in ((1, "ab"), (1, "a"), (1, "abc")):
            for number, part in enumerate(text, start=begun):
                event = advance(number, part)
                event.branches = 10 * number + 1  # the anchor included
                request.handle(event)
            request.restart()
            found.append(list(job.known_branches))
        return found

    assert asyncio.run(run()) == [[10, 20], [10, 20], [10, 20, 30]]


def test_a_request_without_rounds_starts_over() -> None:
    for before in ("", "a"):
        request, _ = after_a_restart(["a", "b", "c"], stream=True, before=before)
        assert request.end is None
        assert request.text == "abc"


def test_attempts_count_until_there_is_progress() -> None:
    request, _ = after_a_restart(["a", "b"], stream=True)
    assert request.attempts == 1


def test_a_stream_whose_text_changes_ends_in_an_error() -> None:
    request, events = after_a_restart(["a", "X", "c"], stream=True)
    assert isinstance(request.end, Failed)
    assert request.end.kind == "lost"
    assert events[-1] is request.end
    assert [event.text for event in events if isinstance(event, Advance)] == ["a", "b"]


def test_without_a_stream_the_later_text_counts() -> None:
    request, _ = after_a_restart(["a", "X", "c"], stream=False)
    assert request.end is None
    assert request.text == "aXc"
