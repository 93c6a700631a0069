"""Minutes of it: engines killed under load, and bytes that no client would send.

What is measured is printed (pytest -s).
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
from typing import Any

import pytest
from hammer import Cases, Tally, hammer
from serving_support import Server, is_alive, until

pytestmark = pytest.mark.soak

KILLS = 20


@pytest.fixture(scope="module")
def busy() -> Iterator[Server]:
    """The built-in model: of six clients three are served and three wait."""
    with Server("--max-running", "3", "--max-queue", "3") as server:
        yield server


def test_engines_killed_during_load(busy: Server, tiny_cases: Cases) -> None:
    tally = Tally()
    load = threading.Thread(
        target=lambda: asyncio.run(hammer(busy.url, tiny_cases, 6, tally=tally)), daemon=True
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
        until(lambda pid=pid: busy.engine_pid != pid, 120, busy)  # type: ignore[misc]
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
