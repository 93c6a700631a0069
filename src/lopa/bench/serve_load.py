"""An endpoint under load: requests arrive as from many people, whether or not it keeps up.

Open loop: arrivals are a Poisson process of a given rate, sampled beforehand, and a request's times
count from when it was due, so that an endpoint that falls behind cannot hide it. Any endpoint that
speaks OpenAI's API with streams will do.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
import numpy as np
from aiohttp.http_exceptions import HttpProcessingError

from lopa.errors import LopaError
from lopa.types import FloatArray

PERCENTILES = (50, 95, 99)
_RESAMPLES = 500  # each takes medians over all requests
_TIMEOUT = 600.0
_LINE_BYTES = 1 << 20  # of a stream: an event with a trace is long
_KEEP_SECONDS = 4.0  # connections that are idle: uvicorn closes them after 5, others later
# Of an endpoint that cannot be reached, or whose answer cannot be read
_ERRORS = (
    aiohttp.ClientError,
    HttpProcessingError,  # a line that is too long
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where to ask, and what every request says beside its prompt."""

    url: str  # up to and including /v1
    model: str
    api_key: str | None = None
    chat: bool = False
    body: dict[str, Any]

    def with_fields(self, **more: Any) -> Endpoint:
        return replace(self, body={**self.body, **more})

    def with_branches(self, number: int | str | None) -> Endpoint:
        """None: the endpoint's own number."""
        return self if number is None else self.with_fields(branches=number)

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}


@dataclass(slots=True)
class Answer:
    """What became of one request; times in seconds from when it was due."""

    status: int = 0  # 0: the connection failed
    first_text: float | None = None
    seconds: float = 0.0
    tokens: int = 0
    branches: float | None = None  # of a round on average, where the endpoint says so
    error: str | None = None

    @property
    def complete(self) -> bool:
        return self.status == 200 and self.error is None


@dataclass(frozen=True, slots=True)
class Offered:
    """One rate for some time, and the answers to its requests."""

    rate: float  # requests per second
    answers: list[Answer]  # in the order of the requests
    seconds: float  # until the last answer
    client_busy: float = 0.0  # of the time, this process: near 1 it is what limits


@dataclass(frozen=True, slots=True)
class Load:
    """One offered load and what came of it, in one run or several."""

    offered: float  # requests per second
    requests: int
    completed: int
    refused: int  # 429 and 503
    failed: int
    server_errors: int  # of status 500 and above
    seconds: float  # until the last answer of each run
    requests_per_second: float  # completed
    tokens_per_second: float
    latency: dict[str, float]  # percentile → seconds, of the completed
    first_text: dict[str, float]
    branches: float | None  # of a round on average, where the endpoint says so
    client_busy: float  # of the time, the process that asked


async def first_model(url: str, api_key: str | None) -> str:
    """The name of what an endpoint serves."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        async with (
            _client(url, headers, timeout=30) as client,
            client.get(f"{url}/models", allow_redirects=False) as response,
        ):
            if response.status != 200:
                raise ValueError(f"status {response.status}")
            return str((await response.json())["data"][0]["id"])
    except _ERRORS as error:
        raise LopaError(
            f"{url}/models does not answer as OpenAI's API would ({_said(error)}): see --url and "
            "--api-key"
        ) from None


async def offer(
    endpoint: Endpoint,
    prompts: Sequence[str],
    *,
    rates: Sequence[float],
    seconds: float,
    seed: int,
) -> list[Offered]:
    """Offer so many requests per second for so long each, and wait for the last answer.

    One rate follows the other without a break: what is left of an overload meets the next.
    """
    due = [
        (step, step * seconds + at)
        for step, rate in enumerate(rates)
        for at in arrivals(rate, seconds, seed + step)
    ]
    ended = [0.0] * len(rates)
    busy = [0.0] * (len(rates) + 1)  # seconds of this process, when each rate begins
    async with _client(endpoint.url, endpoint.headers, timeout=_TIMEOUT) as client:
        began = time.perf_counter()

        async def watch() -> None:
            for step in range(len(busy)):
                await asyncio.sleep(max(0.0, began + step * seconds - time.perf_counter()))
                busy[step] = time.process_time()

        async def one(number: int, step: int, at: float) -> Answer:
            await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
            answer = await _ask(client, endpoint, prompts[number % len(prompts)], began + at)
            ended[step] = time.perf_counter() - began - step * seconds
            return answer

        found, _ = await asyncio.gather(
            asyncio.gather(*(one(number, *each) for number, each in enumerate(due))), watch()
        )
    answers: list[list[Answer]] = [[] for _ in rates]
    for (step, _), answer in zip(due, found, strict=True):
        answers[step].append(answer)
    shares = [(until - since) / seconds for since, until in pairwise(busy)]
    return [Offered(*each) for each in zip(rates, answers, ended, shares, strict=True)]


def arrivals(rate: float, seconds: float, seed: int) -> list[float]:
    """Times of a Poisson process, at least one."""
    rng = random.Random(seed)
    times = [rng.expovariate(rate)]
    while times[-1] < seconds:
        times.append(times[-1] + rng.expovariate(rate))
    return times[:-1] or times


def summarise(runs: Sequence[Offered]) -> Load:
    """Of one rate, in one run or several."""
    answers = [answer for run in runs for answer in run.answers]
    seconds = sum(run.seconds for run in runs)
    done = [answer for answer in answers if answer.complete]
    refused = sum(answer.status in (429, 503) for answer in answers)
    return Load(
        offered=runs[0].rate,
        requests=len(answers),
        completed=len(done),
        refused=refused,
        failed=len(answers) - len(done) - refused,
        server_errors=sum(answer.status >= 500 for answer in answers),
        seconds=seconds,
        requests_per_second=len(done) / seconds,
        tokens_per_second=sum(answer.tokens for answer in done) / seconds,
        latency=percentiles([answer.seconds for answer in done]),
        first_text=percentiles([a.first_text for a in done if a.first_text is not None]),
        branches=_mean([a.branches for a in done if a.branches is not None]),
        client_busy=sum(run.client_busy for run in runs) / len(runs),
    )


@dataclass(frozen=True, slots=True)
class LatencyRatio:
    """Latency of one setting over that of another."""

    ratio: float
    interval: tuple[float, float] | None  # 95 %, over resampled runs; None: there was one run

    def __str__(self) -> str:
        if self.interval is None:
            return f"{self.ratio:.2f}"
        low, high = self.interval
        return f"{self.ratio:.2f} ({low:.2f} … {high:.2f})"


def over_envelope(answers: Mapping[str, Sequence[Sequence[Offered]]]) -> list[LatencyRatio | None]:
    """At each rate in turn: latency with auto over that with the best fixed number.

    A number is compared request by request, by the median of the ratios: all settings were asked
    for the same at the same times. The best one has the highest median in the other runs: chosen
    by the run that it is compared in, it would be the one that was lucky there. answers:
    [runs][rates] by setting. None where nothing was completed with one of them; empty where there
    is nothing to compare.
    """
    fixed = [runs for name, runs in answers.items() if name != "auto"]
    if "auto" not in answers or not fixed:
        return []
    return [_latency_ratio(answers["auto"], fixed, step) for step in range(len(answers["auto"][0]))]


def _latency_ratio(
    auto: Sequence[Sequence[Offered]], fixed: Sequence[Sequence[Sequence[Offered]]], step: int
) -> LatencyRatio | None:
    # [fixed numbers][runs][requests]
    ratios = [
        [_by_request(run[step], other[step]) for run, other in zip(auto, others, strict=True)]
        for others in fixed
    ]
    if not all(any(map(len, of)) for of in ratios):
        return None

    medians = [[median(of) if len(of) else None for of in number] for number in ratios]

    def over_best(runs: Sequence[int]) -> float:
        pooled = []
        for run in runs:
            worth = {}  # by the fixed number, of those with which something was completed
            for number, of in enumerate(medians):
                if (own := of[run]) is not None:
                    others = [of[other] for other in runs if other != run]
                    known = [one for one in others if one is not None]
                    worth[number] = median(known or [own])
            if worth:
                pooled.append(ratios[max(worth, key=worth.__getitem__)][run])
        return float(np.median(np.concatenate(pooled))) if pooled else math.nan

    runs = range(len(auto))
    if len(runs) == 1:
        return LatencyRatio(over_best(runs), None)
    resampled = np.random.default_rng(0).integers(len(runs), size=(_RESAMPLES, len(runs)))
    low, high = np.nanquantile(list(map(over_best, resampled.tolist())), (0.025, 0.975)).tolist()
    return LatencyRatio(over_best(runs), (low, high))


def _by_request(some: Offered, others: Offered) -> FloatArray:
    """Latency of each request over that of the same one in the others, of completed ones."""
    pairs = zip(some.answers, others.answers, strict=True)
    return np.array([a.seconds / b.seconds for a, b in pairs if a.complete and b.complete])


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """By nearest rank: each is a value that was measured. Empty when there is none."""
    ordered = sorted(values)
    return {f"p{p}": ordered[math.ceil(p / 100 * len(ordered)) - 1] for p in PERCENTILES if ordered}


def _client(url: str, headers: Mapping[str, str], *, timeout: float) -> aiohttp.ClientSession:
    """As many connections as there are requests."""
    parts = urlsplit(url)
    # Not `trust_env`, which looks for a proxy and in .netrc at every request.
    by_proxy = parts.hostname and not proxy_bypass(parts.hostname)
    return aiohttp.ClientSession(
        headers=headers,
        timeout=aiohttp.ClientTimeout(total=timeout),
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_SECONDS),
        read_bufsize=_LINE_BYTES,
        proxy=getproxies().get(parts.scheme) if by_proxy else None,
    )


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


async def _ask(
    client: aiohttp.ClientSession, endpoint: Endpoint, prompt: str, due: float
) -> Answer:
    answer = Answer()
    try:
        await _stream(client, endpoint, prompt, due, answer)
    except _ERRORS as error:
        answer.error = _said(error)
    answer.seconds = time.perf_counter() - due
    return answer


async def _stream(
    client: aiohttp.ClientSession, endpoint: Endpoint, prompt: str, due: float, answer: Answer
) -> None:
    path = "chat/completions" if endpoint.chat else "completions"
    asked: dict[str, Any] = {"prompt": prompt}
    if endpoint.chat:
        asked = {"messages": [{"role": "user", "content": prompt}]}
    body = {
        "model": endpoint.model,
        **asked,
        "stream": True,
        "stream_options": {"include_usage": True},
        **endpoint.body,
    }
    ended = False
    async with client.post(f"{endpoint.url}/{path}", json=body, allow_redirects=False) as response:
        answer.status = response.status
        if response.status != 200:
            answer.error = (await response.read()).decode("utf-8", "replace")[:200]
            return
        async for line in response.content:
            data = line.removeprefix(b"data:").strip()
            if not line.startswith(b"data:") or not data:
                continue
            if data == b"[DONE]":
                ended = True
                continue
            event = json.loads(data)
            if event.get("error"):
                answer.error = str(event["error"])[:200]
                return
            if event.get("usage"):
                answer.tokens = int(event["usage"]["completion_tokens"])
            for choice in event.get("choices") or []:
                if "branches" in (choice.get("lopa") or {}):
                    answer.branches = float(choice["lopa"]["branches"])
            if answer.first_text is None and any(map(_text, event.get("choices") or [])):
                answer.first_text = time.perf_counter() - due
    if not ended:
        answer.error = "the stream broke off"


def _text(choice: dict[str, Any]) -> str:
    return choice.get("text") or (choice.get("delta") or {}).get("content") or ""


def plot_load(loads: Sequence[Load], path: str) -> None:
    """Latency, time to first text and throughput against offered load."""
    figure, left, right = _figure()
    offered = [load.offered for load in loads]
    for name, values, colour in (
        ("latency", [load.latency for load in loads], "tab:blue"),
        ("first text", [load.first_text for load in loads], "tab:orange"),
    ):
        for key, style in (("p50", "-"), ("p95", "--"), ("p99", ":")):
            found = [value.get(key, math.nan) for value in values]
            left.plot(offered, found, style, color=colour, marker="o", label=f"{name} {key}")
    left.set(xlabel="offered requests/s", ylabel="seconds", yscale="log")
    left.legend(fontsize="small")
    right.plot(offered, offered, ":", color="grey", label="offered")
    right.plot(offered, [load.requests_per_second for load in loads], marker="o", label="answered")
    right.plot(
        offered, [load.refused / load.seconds for load in loads], marker="x", label="refused"
    )
    right.set(xlabel="offered requests/s", ylabel="requests/s")
    right.legend(fontsize="small")
    figure.savefig(path, dpi=120)


def plot_comparison(loads: Mapping[str, Sequence[Load]], path: str) -> None:
    """Median latency and branches of several settings against offered load, in their order.

    A line that goes up and back shows what an overload leaves behind.
    """
    figure, left, right = _figure()
    for name, each in loads.items():
        offered = [load.offered for load in each]
        line = {"marker": "o", "markersize": 4, "label": name}
        left.plot(offered, [load.latency.get("p50", math.nan) for load in each], **line)
        found = [math.nan if load.branches is None else load.branches for load in each]
        right.plot(offered, found, **line)
    left.set(xlabel="offered requests/s", ylabel="median latency, seconds", yscale="log")
    right.set(xlabel="offered requests/s", ylabel="branches of a round")
    left.legend(fontsize="small", title="branches")
    figure.savefig(path, dpi=120)


def _figure() -> tuple[Any, Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    return figure, left, right
