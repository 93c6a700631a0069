"""The API's side of an engine process that does not behave."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from fragile import DEADLY, FAULTY, FOLDER, HELD, PANIC, SHORT
from serving_support import ROUND_COST

from lopa.serving.api import engine_client
from lopa.serving.api.engine_client import EngineClient
from lopa.serving.api.errors import ApiError
from lopa.serving.api.metrics import Metrics
from lopa.serving.api.request_state import NullObserver, RequestState
from lopa.serving.config import EngineConfig
from lopa.serving.jobs import Failed, Finished, Job

Use = Callable[[EngineClient], Awaitable[Any]]
LLM_OPTIONS = {"round_cost": json.loads(ROUND_COST.read_text())}


async def started(model: str | Path, llm: dict[str, Any] = LLM_OPTIONS, **options: Any) -> Any:
    """A client of the fragile worker, ready or failed."""
    settings = {"block_size": 8, "branches": 1, "max_new_tokens": 32}
    config = EngineConfig(model=str(model), llm=llm, decoding=settings, max_running=3)
    options = {"max_queue": 9, "stall_seconds": 60, **options}
    client = EngineClient(config, Metrics(), module="fragile_worker", **options)
    await client.start()
    while not (client.ready or client.start_failed.is_set()):
        await asyncio.sleep(0.02)
    return client


def with_client(model: str | Path, use: Use, **options: Any) -> tuple[EngineClient, Any]:
    """Run `use` against a fragile worker of its own."""

    async def run() -> tuple[EngineClient, Any]:
        client = await started(model, **options)
        try:
            return client, await use(client)
        finally:
            await client.stop()

    return asyncio.run(run())


class Shared:
    """A fragile worker for tests that leave it as it was; its client is on a loop in a thread."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.folder = folder
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.client = self._wait_for(started(model, health_seconds=1.0))

    def run(self, use: Use) -> Any:
        found = self._wait_for(use(self.client))
        assert self.client.restarts == 0
        return found

    def close(self) -> None:
        self._wait_for(self.client.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _wait_for(self, use: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(use, self._loop).result()


def submit(client: EngineClient, prompts: Sequence[Any]) -> list[RequestState]:
    jobs = [Job(id=uuid.uuid4().hex, prompt=prompt) for prompt in prompts]
    return client.submit(jobs, lambda i, e: None)


async def until(found: Callable[[], Any]) -> None:
    async with asyncio.timeout(60):
        while not found():
            await asyncio.sleep(0.02)


async def until_a_round_ends(client: EngineClient) -> None:
    """On a slow machine not every one does within a second."""
    async with asyncio.timeout(60):
        while await client.check_round():
            await asyncio.sleep(0.2)


async def ends(client: EngineClient, prompts: Sequence[Any]) -> list[RequestState]:
    requests = submit(client, prompts)
    await until(lambda: all(request.end is not None for request in requests))
    return requests


def set_environment(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv(FOLDER, str(folder))


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    set_environment(monkeypatch, tmp_path)


@pytest.fixture(scope="module")
def shared(chat_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    folder = tmp_path_factory.mktemp("fragile")
    with pytest.MonkeyPatch.context() as monkeypatch:
        set_environment(monkeypatch, folder)
        found = Shared(chat_folder, folder)
    yield found
    found.close()


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


@pytest.mark.soak
def test_streams_with_branches_auto_go_on_after_a_restart(chat_folder: Path) -> None:
    """They get the branches that they had, though the load is another: the others are done. The
    engine that is started again goes by what the first measured."""

    async def use(client: EngineClient) -> Any:
        first = client.engine
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
        return requests[0], first, client.engine

    client, (request, first, second) = with_client(chat_folder, use, llm={})
    assert isinstance(request.end, Finished)
    assert client.restarts == 1
    assert request.job.known_branches == request.branches[: len(request.job.known_branches)] != []
    assert first["pid"] != second["pid"]
    assert first["round_cost"] == second["round_cost"] != []


def finished(seconds: float) -> Finished:
    """After a second in the queue."""
    return Finished(
        finish="eos",
        tokens=1,
        rounds=1,
        tpf=1.0,
        branches=0.0,
        seconds=seconds,
        queue_seconds=1.0,
        engine_seconds=seconds + 1.0,
    )


def test_capacity_and_retry_after(tmp_path: Path) -> None:
    """Two sequences run and one waits; recent ones took 10.5 s on average, two at a time."""

    async def run() -> list[ApiError]:
        config = EngineConfig(model=str(tmp_path))
        client = EngineClient(config, NullObserver(), max_queue=1, stall_seconds=60)
        # As reported by an engine that is ready.
        client.engine = {"max_running": 2, "max_request_tokens": 9, "max_prompt_characters": None}
        client._engine_ready = True
        for seconds in (9.0, 12.0):
            client._retry_after.record(finished(seconds))
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


def test_an_error_in_a_round_fails_those_in_it_and_nothing_else(shared: Shared) -> None:
    async def use(client: EngineClient) -> Any:
        first = await ends(client, [[FAULTY], [1, 2]])
        return first, await ends(client, [[1, 2]])

    first, second = shared.run(use)
    assert [request.end for request in first] == [Failed(kind="engine", message="not numbers")] * 2
    assert isinstance(second[0].end, Finished)


def test_a_model_that_cannot_be_loaded_is_said_once(tmp_path: Path) -> None:
    async def use(client: EngineClient) -> None: ...

    client, _ = with_client(tmp_path, use)
    assert client.start_error is not None
    assert "config.json" in client.start_error[0]


def test_a_short_prompt_never_waits_for_a_long_one(shared: Shared) -> None:
    """Long ones go by their length, and one that is aborted is not run."""

    async def use(client: EngineClient) -> Any:
        long = submit(client, [HELD + "x" * length for length in (90, 80, 70, 60)])
        client.abort(long[3])
        await ends(client, ["short", "short " * 3, [1] * SHORT])
        assert [request.accepted.done() for request in long] == [False] * 4
        order: list[int] = []
        for request in long[:3]:
            request.accepted.add_done_callback(lambda f: order.append(f.result().prompt_tokens))
        (shared.folder / "go").touch()
        await until(lambda: all(request.end is not None for request in long[:3]))
        return order, long

    order, long = shared.run(use)
    assert sorted(order) == [74, 84, 94]
    assert order[1] < order[2]  # the first may have been begun before the others came
    assert [type(request.end) for request in long[:3]] == [Finished] * 3
    assert long[3].end is None


def test_prompts_that_cannot_be_read(shared: Shared) -> None:
    """A panic of the tokenizer is its prompt's alone; a prompt that is too long never gets there.

    A token has at most 13 characters.
    """

    async def use(client: EngineClient) -> Any:
        assert client.engine["max_prompt_characters"] == 13 * 512
        prompts = [PANIC, "Hello", PANIC + "x" * SHORT, "Hello " * SHORT]
        panics = await ends(client, prompts)
        text = PANIC + "x" * 13 * 512
        chat = [{"role": "user", "content": text[: 6 * 512]}] * 3
        long = await ends(client, [text, chat, [1] * 513])
        return panics, long, await ends(client, ["Hello", "Hello " * SHORT])

    panics, long, later = shared.run(use)
    assert [type(request.end) for request in panics] == [Failed, Finished, Failed, Finished]
    assert panics[0].end == Failed(
        kind="invalid",
        message="the tokenizer cannot read the prompt (PanicException: index out of bounds): "
        "change it",
        param="prompt",
    )
    for request, words in zip(
        long, ("6661 characters", "9216 characters", "513 parts"), strict=True
    ):
        assert isinstance(request.end, Failed)
        assert (request.end.kind, request.end.param) == ("invalid", "prompt")
        assert not request.submitted
        assert words in request.end.message
    assert [type(request.end) for request in later] == [Finished] * 2


def test_health_of_an_engine_that_is_stuck_or_stopped(shared: Shared) -> None:
    stuck = shared.folder / "stuck"

    async def use(client: EngineClient) -> None:
        await until_a_round_ends(client)
        # The process answers, but no round ends.
        stuck.touch()
        (request,) = submit(client, ["Hello"])
        await until(lambda: client.state == "unresponsive")
        assert not client.ready
        await asyncio.sleep(1.1)  # the last result is too old
        assert await client.check_round() == "no round within 1 seconds"
        stuck.unlink()
        await until(lambda: client.ready and request.end is not None)
        assert isinstance(request.end, Finished)
        # Nothing runs, and the process is stopped.
        os.kill(client.engine["pid"], signal.SIGSTOP)
        await until(lambda: client.state == "unresponsive")
        os.kill(client.engine["pid"], signal.SIGCONT)
        await until(lambda: client.ready)
        await asyncio.sleep(1.1)
        await until_a_round_ends(client)

    shared.run(use)


@pytest.mark.soak
def test_an_idle_engine_that_is_stopped_is_started_again(chat_folder: Path) -> None:
    async def use(client: EngineClient) -> Any:
        os.kill(client.engine["pid"], signal.SIGSTOP)
        await until(lambda: client.restarts == 1 and client.ready)
        return await ends(client, ["Hello"])

    _, (request,) = with_client(chat_folder, use, health_seconds=0.5, stall_seconds=3)
    assert isinstance(request.end, Finished)


@pytest.mark.soak
def test_requests_wait_for_starts_that_fail(
    chat_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_client, "_MAX_RESTART_DELAY_SECONDS", 0.05)

    async def use(client: EngineClient) -> Any:
        (tmp_path / "starts").write_text("5")
        os.kill(client.engine["pid"], signal.SIGKILL)
        await until(lambda: not client.ready)
        return await ends(client, ["Hello"])

    client, (request,) = with_client(chat_folder, use)
    assert isinstance(request.end, Finished)
    assert client.restarts == 6


@pytest.mark.soak
def test_requests_fail_when_no_start_succeeds_for_long(
    chat_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a 503, as new ones do; starts go on."""
    monkeypatch.setattr(engine_client, "_MAX_RESTART_DELAY_SECONDS", 0.05)
    starts = tmp_path / "starts"

    async def use(client: EngineClient) -> Any:
        starts.write_text("1000")
        os.kill(client.engine["pid"], signal.SIGKILL)
        await until(lambda: not client.ready)
        failed = await ends(client, ["Hello"])
        assert client.state == "failed"
        with pytest.raises(ApiError) as refused:
            submit(client, ["Hello"])
        starts.write_text("0")
        await until(lambda: client.ready)
        return failed + await ends(client, ["Hello"]), refused.value

    _, ((failed, later), refused) = with_client(chat_folder, use, stall_seconds=1)
    assert isinstance(failed.end, Failed)
    assert (failed.end.kind, refused.status, refused.code) == (
        "unavailable",
        503,
        "engine_unavailable",
    )
    assert int(refused.headers["Retry-After"]) >= 1
    assert isinstance(later.end, Finished)
