"""Running a server: overload, clients that leave, engines that die, and stopping."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from serving_support import SLOW, Server, data_of, until

from lopa import LLM, DecodeConfig, Output

LONG: dict[str, Any] = {**SLOW, "max_tokens": 160}


def alone(llm: LLM, tokens: int) -> Output:
    return llm.generate("Hello", DecodeConfig(**SLOW, max_new_tokens=tokens))


@pytest.fixture(scope="module")
def small(chat_folder: Path) -> Iterator[Server]:
    """Two sequences at once, one more in the queue; a silent engine is restarted after 3 s."""
    limits = ("--max-running", "2", "--max-queue", "1", "--stall-seconds", "6")
    with Server("--model", str(chat_folder), *limits) as server:
        yield server


def begin(server: Server, count: int = 1, **body: Any) -> list[threading.Thread]:
    """Streams that somebody reads, running by the time this returns."""
    asked = {"prompt": "Hello", "stream": True, **LONG, **body}
    before = len(server.slots())

    def read() -> None:
        with httpx.stream("POST", f"{server.url}/v1/completions", json=asked, timeout=60) as r:
            r.read()

    threads = [threading.Thread(target=read) for _ in range(count)]
    for thread in threads:
        thread.start()
    until(lambda: len(server.slots()) == before + count)
    return threads


def idle(server: Server) -> bool:
    return not server.slots()


def test_health_and_metrics(server: Server) -> None:
    assert server.http.get("/health/live").json() == {"live": True}
    assert server.http.head("/health").status_code == 200
    assert server.http.get("/health").json() == {"live": True, "ready": True, "state": "ready"}
    rounds, tokens = (
        server.metric("lopa_rounds_total"),
        server.metric("lopa_tokens_committed_total"),
    )
    answer = server.complete(max_tokens=16).json()["choices"][0]
    made = answer["lopa"]["rounds"]
    assert server.metric("lopa_rounds_total") == rounds + made
    assert server.metric("lopa_round_seconds_count") == rounds + made
    assert server.metric("lopa_tokens_committed_total") == tokens + 16
    assert server.metric("lopa_ranks_alive") == 1
    assert 0 <= server.metric("lopa_cache_pages_used") < server.metric("lopa_cache_pages")
    assert server.metric("lopa_requests_total", method="GET", path="/health", status="200") >= 1
    wins = [float(line.split()[-1]) for line in server.http.get("/metrics").text.splitlines()
            if line.startswith("lopa_branch_wins_total")]  # fmt: skip
    assert 0 < sum(wins) <= rounds + made
    assert server.metric("lopa_branches_count") == rounds + made
    had = server.metric("lopa_branches_sum")
    gain = server.metric("lopa_expected_gain_tokens_total")
    answer = server.complete(max_tokens=16, branches="auto", objective="tpf").json()["choices"][0]
    auto = answer["lopa"]["branches"]
    assert auto > 0
    added = server.metric("lopa_branches_sum") - had
    assert added == pytest.approx(auto * answer["lopa"]["rounds"])
    assert server.metric("lopa_expected_gain_tokens_total") > gain
    for name in ("queue_seconds", "time_to_first_token_seconds", "tokens_per_forward"):
        assert server.metric(f"lopa_{name}_count") > 0


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_api_adds_to_an_answer(server: Server, stream: bool) -> None:
    """Its time at the API less that in the engine; what is refused is not counted."""
    name = "lopa_api_overhead_seconds"
    count, spent = server.metric(f"{name}_count"), server.metric(f"{name}_sum")
    own = f"overhead-{stream}"
    began = time.perf_counter()
    asked = {"prompt": "Hello", "max_tokens": 32, "stream": stream}
    answer = server.http.post("/v1/completions", json=asked, headers={"x-request-id": own})
    assert answer.status_code == 200
    assert server.complete(max_tokens=10**6).status_code == 400
    line = until(lambda: [x for x in server.lines if x.get("request_id") == own])[0]
    # The client may have read all of it before the server knows: its clock stops at the log line.
    assert 0 < line["engine_seconds"] < line["seconds"] < time.perf_counter() - began
    assert server.metric(f"{name}_count") == count + 1
    added = server.metric(f"{name}_sum") - spent
    assert 0 < added <= line["seconds"] - line["engine_seconds"] + 1e-5


def test_headers_have_a_limit(server: Server) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as end:
        end.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX-Long: " + b"x" * 100_000)
        try:
            answer = end.recv(100)
        except ConnectionResetError:  # it has hung up before all was sent
            answer = b""
        assert answer == b"" or answer.startswith(b"HTTP/1.1 400 ")


def test_log_lines_carry_the_request_id_and_no_prompt(server: Server) -> None:
    response = server.http.post(
        "/v1/completions",
        json={"prompt": "a secret", "max_tokens": 8, "user": "Bo"},
        headers={"x-request-id": "mine-1"},
    )
    assert response.headers["x-request-id"] == "mine-1"
    line = until(lambda: [x for x in server.lines if x.get("request_id") == "mine-1"])[0]
    assert (line["event"], line["status"], line["tokens"]) == ("request", 200, 8)
    assert (line["prompt_tokens"], line["finish"], line["user"]) == (8, "length", "Bo")
    odd = server.http.get("/v1/models", headers={"x-request-id": "a b\tc" * 50})
    assert odd.headers["x-request-id"] != "a b\tc" * 50
    assert "a secret" not in json.dumps(server.lines)


def test_answers_under_load_are_those_of_a_single_request(server: Server, llm: LLM) -> None:
    def ask(seed: int) -> tuple[int, str]:
        body = {"max_tokens": 24, "temperature": 1.0, "seed": seed}
        return seed, server.complete(f"Hello {seed}", **body).json()["choices"][0]["text"]

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(ask, range(8)))
    for seed, text in found:
        drawn = {"temperature": 1.0, "seed": seed}
        config = DecodeConfig(branches=2, score="mean", block_size=8, max_new_tokens=24, **drawn)
        assert llm.generate(f"Hello {seed}", config).text == text


def test_slots_show_what_runs_and_waits(small: Server) -> None:
    threads = begin(small, 3)
    slots = until(lambda: [s for s in [small.slots()] if sum(x["rounds"] > 0 for x in s) == 2])[0]
    assert sorted(slot["state"] for slot in slots) == ["running", "running", "waiting"]
    first = next(slot for slot in slots if slot["state"] == "running")
    assert first["prompt_tokens"] == 5
    assert first["total_tokens"] == 160
    assert 0 < first["filled_tokens"] <= 160
    assert first["tpf"] == pytest.approx(first["filled_tokens"] / first["rounds"])
    assert first["seconds"] > 0
    # Full: the next is told to come back, in a way that clients understand.
    refused = small.complete(max_tokens=1)
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    with (
        openai.OpenAI(base_url=f"{small.url}/v1", api_key="x", max_retries=0) as client,
        pytest.raises(openai.RateLimitError, match="at capacity"),
    ):
        client.completions.create(model="bytes", prompt="Hello")
    assert small.metric("lopa_requests_rejected_total") == 2
    assert small.metric("lopa_requests_running") == 2
    too_many = small.complete(prompt=["x"] * 4, max_tokens=1)
    assert too_many.status_code == 400
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_slot(small: Server, stream: bool) -> None:
    until(lambda: idle(small))
    dropped = small.metric("lopa_answers_dropped_total")
    body = {"prompt": "Hello", **LONG, "stream": stream}
    with httpx.Client(base_url=small.url) as client:
        request = client.build_request("POST", "/v1/completions", json=body)
        if stream:
            response = client.send(request, stream=True)
            next(response.iter_lines())
            response.close()
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post("/v1/completions", json=body, timeout=0.2)
    until(lambda: idle(small))
    assert small.metric("lopa_answers_dropped_total") == dropped + 1
    # The engine lets go of it too, within a round.
    until(lambda: small.metric("lopa_cache_tokens") == 0)


@pytest.mark.parametrize("mode", ["text", pytest.param("denoise", marks=pytest.mark.soak)])
def test_a_stream_goes_on_where_it_was_when_the_engine_is_killed(
    small: Server, llm: LLM, mode: str
) -> None:
    wanted = alone(llm, 160)
    body = {"prompt": "Hello", **LONG, "stream": True, "stream_mode": mode}
    restarts = small.metric("lopa_engine_restarts")
    with httpx.stream("POST", f"{small.url}/v1/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()
        seen = [next(lines) for _ in range(4)]
        os.kill(small.engine_pid, signal.SIGKILL)
        events = data_of([*seen, *lines])
    assert small.metric("lopa_engine_restarts") == restarts + 1
    assert events[-1] == "[DONE]"
    if mode == "text":
        assert "".join(event["choices"][0]["text"] for event in events[:-1]) == wanted.text
    else:
        indices = [event["index"] for event in events if event != "[DONE]" and "index" in event]
        assert indices == list(range(1, wanted.rounds + 1))
        assert events[-2]["text"] == wanted.text


@pytest.mark.soak
def test_waiting_requests_survive_the_engine_too(small: Server, llm: LLM) -> None:
    wanted = alone(llm, 100)
    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(small.complete, **SLOW, max_tokens=100) for _ in range(3)]
        until(lambda: any(slot["rounds"] for slot in small.slots()))
        os.kill(small.engine_pid, signal.SIGKILL)
        until(lambda: not small.ready)
        assert small.http.get("/health").json()["state"] == "restarting"
        texts = [answer.result().json()["choices"][0]["text"] for answer in asked]
    assert texts == [wanted.text] * 3
    small.wait_ready()


@pytest.mark.soak
def test_an_engine_that_says_nothing_is_started_again(small: Server) -> None:
    threads = begin(small)
    os.kill(small.engine_pid, signal.SIGSTOP)
    until(lambda: small.logged("engine stuck"))
    for thread in threads:
        thread.join()
    assert small.complete(max_tokens=1).status_code == 200


def test_stopping_finishes_what_runs(chat_folder: Path, llm: LLM) -> None:
    with Server("--model", str(chat_folder), wait=False) as server:
        # Until the model is there, requests are told so.
        early = server.complete(max_tokens=1)
        assert early.status_code == 503
        assert early.json()["error"]["code"] == "loading"
        assert server.http.get("/health").status_code == 503
        assert server.http.get("/health/live").status_code == 200
        server.wait_ready()
        events = stream_through(server, signal.SIGTERM, 100)
        assert events[-1] == "[DONE]"
        text = "".join(event["choices"][0]["text"] for event in events[:-1])
        assert text == alone(llm, 100).text
        assert server.stop() == 0
        assert server.noise == []


def test_stopping_has_a_limit(chat_folder: Path) -> None:
    with Server("--model", str(chat_folder), LOPA_DRAIN_SECONDS="0.2") as server:
        events = stream_through(server, signal.SIGINT, 500)
        assert events[-2]["error"]["code"] == "shutting_down"
        while server.process.poll() is None:  # until the very end
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.002)
        assert server.stop() == 0


def stream_through(server: Server, number: signal.Signals, tokens: int) -> list[Any]:
    """The events of a stream during which the server is told to stop."""
    body = {"prompt": "Hello", **SLOW, "max_tokens": tokens, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()
        seen = [next(lines)]
        server.process.send_signal(number)
        return data_of([*seen, *lines])
