"""The API's side of an engine process that does not behave."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from fragile import DEADLY, FAULTY

from lopa.serving.api.engine_client import EngineClient
from lopa.serving.api.errors import ApiError
from lopa.serving.api.metrics import Metrics
from lopa.serving.api.request_state import NullObserver, RequestState
from lopa.serving.config import EngineConfig
from lopa.serving.jobs import Failed, Finished, Job


def with_client(
    model: str | Path, use: Callable[[EngineClient], Awaitable[Any]], **options: Any
) -> tuple[EngineClient, Any]:
    """Run `use` against the fragile worker."""
    settings = {"block_size": 8, "branches": 1, "max_new_tokens": 32}
    config = EngineConfig(model=str(model), decoding=settings, max_running=3)

    async def run() -> tuple[EngineClient, Any]:
        client = EngineClient(
            config, Metrics(), max_queue=9, stall_seconds=60, module="fragile_worker", **options
        )
        await client.start()
        try:
            while not (client.ready or client.start_failed.is_set()):
                await asyncio.sleep(0.02)
            return client, await use(client)
        finally:
            await client.stop()

    return asyncio.run(run())


async def ends(client: EngineClient, prompts: list[list[int]]) -> list[RequestState]:
    jobs = [Job(id=str(i), prompt=prompt) for i, prompt in enumerate(prompts)]
    requests = client.submit(jobs, lambda i, e: None)
    while any(request.end is None for request in requests):
        await asyncio.sleep(0.02)
    return requests


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.soak
def test_a_request_that_kills_engines_takes_no_other_with_it(chat_folder: Path) -> None:
    prompts = [[1, 2], [DEADLY], [3, 4], [5], [6]]
    client, requests = with_client(chat_folder, lambda client: ends(client, prompts))
    kinds = [type(request.end).__name__ for request in requests]
    assert kinds == ["Finished", "Failed", "Finished", "Finished", "Finished"]
    assert requests[1].end == Failed(
        kind="engine", message="the engine died 5 times while it ran this request"
    )
    assert client.restarts == 5


def test_an_engine_that_is_started_again_goes_by_what_the_first_measured(chat_folder: Path) -> None:
    async def use(client: EngineClient) -> Any:
        first = client.engine
        os.kill(first["pid"], signal.SIGKILL)
        while client.engine is first:
            await asyncio.sleep(0.02)
        return first, client.engine

    _, (first, second) = with_client(chat_folder, use)
    assert first["pid"] != second["pid"]
    assert first["round_cost"] == second["round_cost"] != []


def test_streams_with_branches_auto_go_on_after_a_restart(chat_folder: Path) -> None:
    """They get the branches that they had, though the load is another: the others are done."""

    async def use(client: EngineClient) -> Any:
        options = {"branches": "auto", "max_new_tokens": 64}
        jobs = [Job(id=str(i), prompt=[5 + i, 9], options=options, stream=True) for i in range(3)]
        requests = client.submit(jobs, lambda i, e: None)
        while requests[0].rounds < 4:
            await asyncio.sleep(0.005)
        for request in requests[1:]:
            client.abort(request)
        os.kill(client.engine["pid"], signal.SIGKILL)
        while requests[0].end is None:
            await asyncio.sleep(0.02)
        return requests[0]

    client, request = with_client(chat_folder, use)
    assert isinstance(request.end, Finished)
    assert client.restarts == 1
    assert request.job.known_branches == request.branches[: len(request.job.known_branches)] != []


def test_capacity_and_retry_after(tmp_path: Path) -> None:
    """Two sequences run and one waits; recent ones took 10.5 s on average, two at a time."""

    async def run() -> list[ApiError]:
        config = EngineConfig(model=str(tmp_path))
        client = EngineClient(config, NullObserver(), max_queue=1, stall_seconds=60)
        client.engine = {"max_running": 2}  # as reported by an engine that is ready
        client._recent_seconds.extend([9.0, 12.0])
        errors = []
        for count in (3, 1, 4):
            try:
                jobs = [Job(id=f"{count}-{i}", prompt="x") for i in range(count)]
                client.submit(jobs, lambda i, e: None)
            except ApiError as error:
                errors.append(error)
        return errors

    full, too_many = asyncio.run(run())
    assert (full.status, full.code, full.headers["Retry-After"]) == (429, "queue_full", "6")
    assert (too_many.status, "Retry-After" in too_many.headers) == (400, False)


def test_an_error_in_a_round_fails_those_in_it_and_nothing_else(chat_folder: Path) -> None:
    async def use(client: EngineClient) -> Any:
        first = await ends(client, [[FAULTY], [1, 2]])
        return first, await ends(client, [[1, 2]])

    client, (first, second) = with_client(chat_folder, use)
    assert [request.end for request in first] == [Failed(kind="engine", message="not numbers")] * 2
    assert isinstance(second[0].end, Finished)
    assert client.restarts == 0


def test_a_model_that_cannot_be_loaded_is_said_once(tmp_path: Path) -> None:
    async def use(client: EngineClient) -> None: ...

    client, _ = with_client(tmp_path, use)
    assert client.start_error is not None
    assert "config.json" in client.start_error[0]
