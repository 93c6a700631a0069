"""A server whose engine runs on ranks: the same answers, and what is lost comes back."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from serving_support import SLOW, Server, children, data_of, is_alive, until

from lopa import LLM

pytestmark = pytest.mark.soak

MODEL = "dummy:dream-tiny"
RANKS = ("--model", MODEL, "--branch-parallel", "2", "--rank-timeout", "5", "--device", "cpu")


def ranks_of(server: Server) -> list[int]:
    """Children of the process that forks them, which is the engine's only child."""
    return [pid for nursery in children(server.engine_pid) for pid in children(nursery)]


def recover(server: Server, lost: int) -> None:
    """Until every rank is up and known to be, none of them the one that was killed."""
    until(lambda: not is_alive(lost))

    def whole() -> bool:
        pids = ranks_of(server)
        return len(pids) == 2 and lost not in pids and server.metric("lopa_ranks_alive") == 2

    until(whole, server)


@pytest.fixture(scope="module")
def cases() -> list[tuple[dict[str, Any], str]]:
    """Requests, and what one process answers that is asked nothing else."""
    llm = LLM(MODEL, device="cpu")
    found = []
    for seed in range(6):
        prompt = f"Hello {seed}"
        options: dict[str, Any] = {"block_size": 8, "branches": 1 + seed % 3}
        options["attention"] = ("full", "block")[seed % 2]
        if seed % 3 == 2:
            options |= {"temperature": 0.7, "seed": seed}
        config = llm.decode_config(**options, max_new_tokens=32)
        text = llm.generate(prompt, config).text
        found.append(({"prompt": prompt, "max_tokens": 32, **options}, text))
    return found


@pytest.fixture(scope="module")
def two() -> Iterator[Server]:
    with Server(*RANKS, "--cache-tokens", "512") as server:
        yield server
        engine, ranks = server.engine_pid, ranks_of(server)
        assert len(ranks) == 2
        nurseries = children(engine)
        assert server.stop() == 0
        assert not [pid for pid in (engine, *nurseries, *ranks) if is_alive(pid)]
        assert server.noise == []


def test_the_answers_are_those_of_one_process(two: Server, cases: Any) -> None:
    assert two.metric("lopa_ranks_alive") == 2
    with ThreadPoolExecutor(len(cases)) as pool:
        answers = list(pool.map(lambda case: two.complete(**case[0]).json(), cases))
    assert [answer["choices"][0]["text"] for answer in answers] == [text for _, text in cases]
    body, text = cases[0]
    with two.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        events = data_of(response.iter_lines())
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == text


def test_pages_are_told_while_they_are_held_and_after(two: Server) -> None:
    pages = two.metric("lopa_cache_pages")
    assert pages == 512 / 64
    body = {"prompt": "Hello", "max_tokens": 400, "stream": True, **SLOW}
    with two.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()  # held: it closes the stream when it goes
        next(lines)
        until(lambda: two.metric("lopa_cache_pages_used") >= 7, two)
    until(lambda: two.slots() == [], two)  # the client has left, and nothing runs any more
    # Kept: its own prompt, and the one page of others' prompts that its seven left.
    until(lambda: two.metric("lopa_cache_pages_used") <= 2, two)


@pytest.mark.parametrize("stream", [False, True])
def test_what_no_cache_can_hold_is_refused(two: Server, stream: bool) -> None:
    refused = two.complete(max_tokens=600, block_size=8, stream=stream)
    assert refused.status_code == 400
    assert "the whole KV cache holds 512" in refused.json()["error"]["message"]


def test_an_idle_rank_that_dies_is_replaced(two: Server, cases: Any) -> None:
    lost = ranks_of(two)[1]
    os.kill(lost, signal.SIGKILL)
    recover(two, lost)
    assert [line["note"] for line in two.logged("engine note")][-2].startswith("rank 1 was lost")
    body, text = cases[1]
    assert two.complete(**body).json()["choices"][0]["text"] == text
    assert two.metric("lopa_engine_restarts") == 0


def test_a_killed_engine_leaves_no_rank(two: Server, cases: Any) -> None:
    engine, ranks = two.engine_pid, ranks_of(two)
    nurseries = children(engine)
    os.kill(engine, signal.SIGKILL)
    until(lambda: not [pid for pid in (*nurseries, *ranks) if is_alive(pid)])
    until(lambda: two.engine_pid != engine, two)
    body, text = cases[2]
    assert two.complete(**body).json()["choices"][0]["text"] == text
    assert two.metric("lopa_ranks_alive") == 2


def test_parts_of_a_model(cases: Any) -> None:
    with Server("--model", MODEL, "--tensor-parallel", "2", "--device", "cpu") as server:
        assert server.metric("lopa_ranks_alive") == 2
        answers = [server.complete(**body).json() for body, _ in cases]
    assert [answer["choices"][0]["text"] for answer in answers] == [text for _, text in cases]


def test_a_request_that_the_model_cannot_answer(chat_folder: Path, tmp_path: Path) -> None:
    """It fails alone, and in its first round; the group that it cost is replaced."""
    copy = Path(shutil.copytree(chat_folder, tmp_path / "model"))
    weights = load_file(copy / "model.safetensors")
    (name,) = (name for name in weights if "embed_tokens" in name)
    weights[name][250] = float("nan")
    save_file(weights, copy / "model.safetensors")
    with Server("--model", str(copy), *RANKS[2:]) as server:
        good = server.complete("Hello", max_tokens=16)
        assert good.status_code == 200
        bad = server.complete([72, 250, 72], max_tokens=16)
        assert bad.status_code == 500
        assert "numbers" in bad.json()["error"]["message"]
        again = server.complete("Hello", max_tokens=16)
        assert again.json()["choices"][0]["text"] == good.json()["choices"][0]["text"]
        assert server.metric("lopa_ranks_alive") == 2
        assert server.metric("lopa_engine_restarts") == 0


def test_a_model_that_cannot_be_cut_like_this() -> None:
    command = [sys.executable, "-m", "lopa", "serve", "--port", "0", "--tensor-parallel", "3"]
    ended = subprocess.run([*command, "--model", MODEL], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert "tensor-parallel 3 cannot cut this model" in ended.stderr.splitlines()[-1]
