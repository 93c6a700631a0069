"""Many clients at once, each asking again as soon as it has its answer, and what became of it."""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx


@dataclass
class Tally:
    answered: int = 0
    refused: int = 0  # 429
    wrong: list[str] = field(default_factory=list)  # anything else that should not be
    closed: bool = False  # set by whoever has had enough
    overhead: list[float] = field(default_factory=list)  # seconds beyond the engine's


async def hammer(
    url: str,
    cases: Sequence[tuple[dict[str, Any], str]],
    clients: int,
    seconds: float = math.inf,
    tally: Tally | None = None,
) -> Tally:
    """Ask cases (request, expected text) at random until the time is up, or the tally is closed.

    What has been asked by then is waited for.
    """
    tally = tally or Tally()
    end = time.monotonic() + seconds
    limits = httpx.Limits(max_connections=clients)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:
        await asyncio.gather(
            *(_one(client, cases, end, random.Random(i), tally) for i in range(clients))
        )
    return tally


async def _one(
    client: httpx.AsyncClient,
    cases: Sequence[tuple[dict[str, Any], str]],
    end: float,
    draw: random.Random,
    tally: Tally,
) -> None:
    while time.monotonic() < end and not tally.closed:
        body, expected = draw.choice(cases)
        stream = draw.random() < 0.5
        began = time.perf_counter()
        try:
            status, text, figures = await (_streamed if stream else _whole)(client, body)
        except (httpx.HTTPError, ValueError, KeyError) as error:
            tally.wrong.append(f"{type(error).__name__}: {error}")
            continue
        if status == 429:
            tally.refused += 1
            await asyncio.sleep(draw.uniform(0.5, 1.5))
        elif status != 200 or text != expected:
            tally.wrong.append(f"{status} {text!r} where {expected!r} was expected")
        else:
            tally.answered += 1
            spent = time.perf_counter() - began
            tally.overhead.append(spent - figures["engine_seconds"])


async def _whole(client: httpx.AsyncClient, body: dict[str, Any]) -> tuple[int, str, Any]:
    response = await client.post("/v1/completions", json=body)
    if response.status_code != 200:
        return response.status_code, response.text, None
    choice = response.json()["choices"][0]
    return 200, choice["text"], choice["lopa"]


async def _streamed(client: httpx.AsyncClient, body: dict[str, Any]) -> tuple[int, str, Any]:
    asked = {**body, "stream": True}
    text, figures = "", None
    async with client.stream("POST", "/v1/completions", json=asked) as response:
        if response.status_code != 200:
            return response.status_code, (await response.aread()).decode(), None
        last = ""
        async for line in response.aiter_lines():
            last = line or last
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                choice = event["choices"][0]  # KeyError: an error event
                text += choice["text"]
                figures = choice.get("lopa", figures)
    if last != "data: [DONE]":
        raise ValueError(f"the stream broke off after {text!r}")
    return 200, text, figures
