"""Many clients at once, each asking again as soon as it has its answer, and what became of it.

The clients are light: they share the machine with the server whose times they take.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

Cases = Sequence[tuple[dict[str, Any], str]]  # requests, and the text that is right


@dataclass
class Tally:
    answered: int = 0
    refused: int = 0  # 429
    wrong: list[str] = field(default_factory=list)  # anything else that should not be
    closed: bool = False  # set by whoever has had enough
    seconds: list[float] = field(default_factory=list)  # of each answer
    overhead: list[float] = field(default_factory=list)  # of those beyond the engine's


async def hammer(
    url: str,
    cases: Cases,
    clients: int,
    seconds: float = math.inf,
    tally: Tally | None = None,
) -> Tally:
    """Ask cases at random until the time is up, or the tally is closed.

    What has been asked by then is waited for.
    """
    tally = tally or Tally()
    end = time.monotonic() + seconds
    await asyncio.gather(*(_one(url, cases, end, random.Random(i), tally) for i in range(clients)))
    return tally


async def _one(
    url: str,
    cases: Cases,
    end: float,
    draw: random.Random,
    tally: Tally,
) -> None:
    async with aclosing(Connection(url)) as connection:
        while time.monotonic() < end and not tally.closed:
            body, expected = draw.choice(cases)
            stream = draw.random() < 0.5
            began = time.perf_counter()
            try:
                status, answer = await connection.post(
                    "/v1/completions", {**body, "stream": stream}
                )
                if status == 429:
                    tally.refused += 1
                    await asyncio.sleep(draw.uniform(0.5, 1.5))
                    continue
                spent = time.perf_counter() - began
                text, figures = (_streamed if stream else _whole)(answer)
            except (OSError, EOFError, ValueError, LookupError) as error:
                tally.wrong.append(f"{type(error).__name__}: {error}")
                await connection.aclose()
                continue
            if status != 200 or text != expected:
                tally.wrong.append(f"{status} {text!r} where {expected!r} was expected")
            else:
                tally.answered += 1
                tally.seconds.append(spent)
                tally.overhead.append(spent - figures["engine_seconds"])


async def refused_long(url: str, text: str, clients: int, tally: Tally) -> int:
    """Ask for the continuation of a text that is too long, again and again, until the tally is
    closed; returns how often it was refused."""
    body = json.dumps({"prompt": text, "max_tokens": 1}).encode()
    counts = await asyncio.gather(*(_refused(url, body, tally) for _ in range(clients)))
    return sum(counts)


async def _refused(url: str, body: bytes, tally: Tally) -> int:
    count = 0
    async with aclosing(Connection(url)) as connection:
        while not tally.closed:
            status, answer = await connection.post("/v1/completions", body)
            if status == 429:
                await asyncio.sleep(1)
            elif status != 400:
                tally.wrong.append(f"{status} {answer!r:.300}")
            count += status == 400
    return count


def _whole(answer: bytes) -> tuple[str, Any]:
    choice = json.loads(answer)["choices"][0]
    return choice["text"], choice["lopa"]


def _streamed(answer: bytes) -> tuple[str, Any]:
    *events, last = [line.removeprefix(b"data: ") for line in answer.split(b"\n\n") if line]
    if last != b"[DONE]":
        raise ValueError(f"the stream broke off: {answer!r}")
    choices = [json.loads(event)["choices"][0] for event in events if not event.startswith(b":")]
    return "".join(choice["text"] for choice in choices), choices[-1]["lopa"]


class Connection:
    """HTTP over one connection that is kept, as far as a server's answers need it."""

    def __init__(self, url: str) -> None:
        place = urlsplit(url)
        self._host, self._port = place.hostname, place.port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, path: str, body: dict[str, Any] | bytes) -> tuple[int, bytes]:
        if self._streams is None:
            self._streams = await asyncio.open_connection(self._host, self._port)
        reader, writer = self._streams
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(content)}\r\n\r\n"
        )
        writer.write(head.encode() + content)
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines if line)
        if headers.get("transfer-encoding") == "chunked":
            answer = await _chunks(reader)
        else:
            answer = await reader.readexactly(int(headers["content-length"]))
        if headers.get("connection") == "close":
            await self.aclose()
        return int(first.split()[1]), answer

    async def aclose(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    found = b""
    while size := int(await reader.readline(), 16):
        found += await reader.readexactly(size)
        await reader.readexactly(2)
    await reader.readexactly(2)
    return found
