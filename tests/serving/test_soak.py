"""Bytes that no client would send, by the hundred.

What is measured is printed (pytest -s).
"""

from __future__ import annotations

import random
import socket
from typing import Any

import pytest
from serving_support import Server

pytestmark = pytest.mark.soak


def test_raw_bytes(server: Server) -> None:
    """What no HTTP library would send: nothing of it is a 5xx, and the server goes on."""
    draw = random.Random(1)
    host, port = server.url.removeprefix("http://").split(":")
    body = b'{"prompt": "Hello", "max_tokens": 2}'
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
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
