"""Minutes of it: four times the load that can be served, engines killed, requests made up.

LOPA_SOAK_SECONDS is how long the load lasts. What is measured is printed (pytest -s).
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hammer import Tally, hammer
from serving_support import Server, is_alive, until

from lopa import LLM
from lopa.evaluation.tasks import generate

pytestmark = pytest.mark.soak

SECONDS = float(os.environ.get("LOPA_SOAK_SECONDS", "30"))
CLIENTS = 64
KILLS = 20


@pytest.fixture(scope="module")
def cases() -> list[tuple[dict[str, Any], str]]:
    """Requests to the built-in model and what it answers when it is asked nothing else."""
    llm = LLM("tiny")
    found = []
    for seed in range(8):
        problem = generate(("words", "functions")[seed % 2], seed=seed, split="eval")
        options: dict[str, Any] = {"block_size": 8, "branches": seed % 3}
        if seed % 4 == 3:
            options |= {"temperature": 0.7, "seed": seed}
        config = llm.decode_config(**options, max_new_tokens=16)
        body = {"prompt": problem.prompt, "max_tokens": 16, **options}
        found.append((body, llm.generate(problem.prompt, config).text))
    return found


@pytest.fixture(scope="module")
def busy() -> Iterator[Server]:
    """The built-in model, with room for a quarter of the clients."""
    with Server("--max-running", "8", "--max-queue", "8") as server:
        yield server


def resident(pid: int) -> float:
    """Memory of a process in MB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    raise AssertionError


def test_four_times_what_can_be_served(busy: Server, cases: Any) -> None:
    asyncio.run(hammer(busy.url, cases, 8, SECONDS / 5))  # until everything has its size
    pids = (busy.process.pid, busy.engine_pid)
    before = [resident(pid) for pid in pids]
    began = time.monotonic()
    tally = asyncio.run(hammer(busy.url, cases, CLIENTS, SECONDS))
    after = [resident(pid) for pid in pids]
    rate = tally.answered / (time.monotonic() - began)
    print(
        f"\nload: {CLIENTS} clients, {SECONDS:.0f} s: {tally.answered} answers ({rate:.1f}/s), "
        f"{tally.refused} refused, {len(tally.wrong)} wrong; overhead of an answer, clients on the "
        f"same cores: median {statistics.median(tally.overhead) * 1e3:.1f} ms; "
        f"memory of API and engine {before} → {after} MB"
    )
    assert tally.wrong == []
    assert tally.answered > 20
    assert tally.refused > tally.answered / 4
    assert busy.metric("lopa_requests_rejected_total") >= tally.refused
    for old, new in zip(before, after, strict=True):
        assert new < old * 1.1 + 20
    assert busy.slots() == []


def test_engines_killed_during_load(busy: Server, cases: Any) -> None:
    tally = Tally()
    load = threading.Thread(
        target=lambda: asyncio.run(hammer(busy.url, cases, 12, tally=tally)), daemon=True
    )
    load.start()
    draw = random.Random(0)
    recoveries = []
    for _ in range(KILLS):
        answered, pid = tally.answered, busy.engine_pid
        until(lambda answered=answered: tally.answered > answered, 60, busy)  # type: ignore[misc]
        time.sleep(draw.uniform(0, 1))
        os.kill(pid, signal.SIGKILL)
        began = time.monotonic()
        until(lambda pid=pid: busy.engine_pid != pid, 15, busy)  # type: ignore[misc]
        recoveries.append(time.monotonic() - began)
        assert not is_alive(pid)
    tally.closed = True
    load.join()
    print(
        f"\nfaults: {KILLS} engines killed, {tally.answered} answers, {len(tally.wrong)} wrong; "
        f"recovery median {statistics.median(recoveries):.1f} s, most {max(recoveries):.1f} s"
    )
    assert tally.wrong == []
    assert tally.answered > KILLS
    assert busy.metric("lopa_engine_restarts") == KILLS


def test_raw_bytes(server: Server) -> None:
    """What no HTTP library would send: nothing of it is a 5xx, and the server goes on."""
    draw = random.Random(1)
    host, port = server.url.removeprefix("http://").split(":")
    body = b'{"prompt": "Hello", "max_tokens": 2}'
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Connection: close\r\nContent-Length: %d\r\n\r\n"
    )
    good = head % len(body) + body
    statuses: dict[str, int] = {}
    for number in range(600):
        data = bytearray(good if number % 2 else body)
        for _ in range(draw.randrange(1, 12)):
            place = draw.randrange(len(data))
            kind = draw.randrange(4)
            if kind == 0:
                data[place] = draw.randrange(256)
            elif kind == 1:
                del data[place : place + draw.randrange(8)]
            elif kind == 2:
                data[place:place] = draw.randbytes(draw.randrange(20))
            else:
                data[place:place] = data[: draw.randrange(40)]
        if number % 2 == 0:  # a sound head, and a body that may be anything
            data = bytearray(head % len(data)) + data
        if number % 50 == 1:
            data = bytearray(draw.randbytes(2000))
        with socket.create_connection((host, int(port)), timeout=10) as end:
            end.sendall(data)
            end.shutdown(socket.SHUT_WR)
            answer = b""
            try:
                while part := end.recv(65536):
                    answer += part
            except ConnectionResetError:
                pass
        status = answer[9:12].decode("latin-1") if answer.startswith(b"HTTP/1.1 ") else "none"
        statuses[status] = statuses.get(status, 0) + 1
    print(f"\nraw: {statuses}")
    assert not [status for status in statuses if status.startswith("5")]
    assert server.complete(max_tokens=1).status_code == 200
    assert not [line for line in server.lines if line["level"] == "error"]


HEADERS = ("authorization", "x-request-id", "content-type", "accept", "origin", "content-length",
           "transfer-encoding", "expect", "cookie", "x-forwarded-for", "connection")  # fmt: skip


def test_odd_headers(server: Server) -> None:
    draw = random.Random(2)
    statuses: dict[int, int] = {}
    for _ in range(300):
        name = draw.choice(HEADERS)
        value = bytes(draw.choice([*range(0x20, 0x7F), 0xFF, 9]) for _ in range(draw.randrange(30)))
        content = b'{"prompt": "Hello", "max_tokens": 1}'
        headers: Any = {"content-type": "application/json", name: value}
        try:
            response = server.http.post("/v1/completions", content=content, headers=headers)
        except Exception:
            continue  # the library refuses to send it
        statuses[response.status_code] = statuses.get(response.status_code, 0) + 1
    print(f"\nheaders: {statuses}")
    assert statuses
    assert max(statuses) < 500
