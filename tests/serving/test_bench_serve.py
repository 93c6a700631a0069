"""Load against an endpoint: arrivals that do not wait, and figures that hide nothing."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from serving_support import Server

from lopa.bench import serve_load
from lopa.bench.serve_load import (
    Answer,
    Endpoint,
    Offered,
    arrivals,
    offer,
    over_envelope,
    percentiles,
    plot_load,
    summarise,
)
from lopa.cli.main import main


def test_arrivals_are_a_poisson_process() -> None:
    times = arrivals(50, 100, seed=1)
    assert len(times) == pytest.approx(5000, rel=0.05)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    spread = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert spread == pytest.approx(mean, rel=0.1)  # as of an exponential distribution
    assert arrivals(0.001, 1, seed=1)  # at least one
    assert arrivals(5, 10, seed=2) == arrivals(5, 10, seed=2)


def test_percentiles_are_values_that_were_measured() -> None:
    assert percentiles([3.0, 1.0, 2.0]) == {"p50": 2.0, "p95": 3.0, "p99": 3.0}
    assert percentiles([]) == {}


def test_what_was_refused_or_failed_is_not_answered() -> None:
    answers = [
        Answer(status=200, first_text=0.1, seconds=1.0, tokens=5),
        Answer(status=429, error="full"),
        Answer(status=0, error="reset"),
        Answer(status=200, error="broke off", seconds=9.0),
    ]
    load = summarise([Offered(2.0, answers, 2.0)])
    assert (load.completed, load.refused, load.failed) == (1, 1, 2)
    assert (load.latency["p99"], load.tokens_per_second) == (1.0, 2.5)
    quick = Offered(2.0, [Answer(status=200, seconds=0.5, tokens=4)] * 2, 1.0)
    load = summarise([Offered(2.0, answers, 2.0), quick])  # of two runs
    assert (load.offered, load.requests, load.completed, load.seconds) == (2.0, 6, 3, 3.0)
    assert (load.latency["p50"], load.tokens_per_second) == (0.5, 13 / 3)


def test_auto_is_compared_request_by_request() -> None:
    def runs(*seconds: Sequence[float | None]) -> list[list[Offered]]:
        """Two alike, of so many rates."""
        made = [
            [Answer(status=200, seconds=s) if s else Answer(status=429) for s in each]
            for each in seconds
        ]
        return [[Offered(1.0, answers, 1.0) for answers in made]] * 2

    fixed = {
        "0": runs([2.0, 20.0, 4.0], [1.0], [1.0], [1.0]),
        "7": runs([1.0, None, 5.0], [3.0], [None], [1.0]),
    }
    found = over_envelope({"auto": runs([2.2, 10.0, 5.0], [2.0], [1.0], [None]), **fixed})
    # Of 1.1, 0.5 and 1.25 or, which are harder, of 2.2 and 1.0; of 2.0 or 0.67
    assert [one and one.ratio for one in found] == [pytest.approx(1.6), 2.0, None, None]
    assert found[1] is not None
    assert found[1].interval == (2.0, 2.0)  # both runs gave that
    assert over_envelope(fixed) == over_envelope({"auto": fixed["0"]}) == []


def test_the_interval_of_a_comparison_is_over_runs() -> None:
    def runs(*seconds: float) -> list[list[Offered]]:
        return [[Offered(1.0, [Answer(status=200, seconds=s)] * 3, 1.0)] for s in seconds]

    (one,) = over_envelope({"auto": runs(1.0, 1.2, 1.1, 1.05, 1.15), "3": runs(*[1.0] * 5)})
    assert one is not None
    assert one.ratio == pytest.approx(1.1)
    assert one.interval is not None
    low, high = one.interval
    assert 1.0 <= low < 1.1 < high <= 1.2
    (one,) = over_envelope({"auto": runs(1.1), "3": runs(1.0)})
    assert one is not None
    assert one.interval is None
    # A number with which nothing was completed in some runs takes no run from the others.
    refused = [[Offered(1.0, [Answer(status=429)] * 3, 1.0)]] * 2
    few = {"15": runs(1.0) + refused, "31": refused + runs(1.0)}
    (one,) = over_envelope({"auto": runs(1.0, 3.0, 3.0), "3": runs(1.0, 1.0, 1.0), **few})
    assert one is not None
    assert (one.ratio, one.interval) == (3.0, (1.0, 3.0))
    (one,) = over_envelope({"auto": runs(2.0, 2.0), "3": runs(1.0) + refused[:1]})
    assert one is not None
    assert (one.ratio, one.interval) == (2.0, (2.0, 2.0))


def test_the_best_number_of_a_run_is_chosen_by_the_other_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of numbers that are all alike none is better: by its own run one would always be."""
    monkeypatch.setattr(serve_load, "_RESAMPLES", 10)
    chance = np.random.default_rng(3)

    def runs() -> list[list[Offered]]:
        seconds = chance.lognormal(0.0, 0.3, size=8)  # of a run, all of its requests
        return [[Offered(1.0, [Answer(status=200, seconds=s)] * 3, 1.0)] for s in seconds]

    ratios = []
    for _ in range(30):
        (one,) = over_envelope({name: runs() for name in ("auto", "0", "1", "3", "7", "15")})
        assert one is not None
        ratios.append(one.ratio)
    assert np.log(ratios).mean() == pytest.approx(0.0, abs=0.08)
    # One that is better than the others is the best in all runs.
    better = {"7": [[Offered(1.0, [Answer(status=200, seconds=0.5)], 1.0)]] * 3}
    same = [[Offered(1.0, [Answer(status=200, seconds=1.0)], 1.0)]] * 3
    (one,) = over_envelope({"auto": same, "3": same, **better})
    assert one is not None
    assert one.ratio == 2.0


def _stream_of(*events: object) -> bytes:
    lines = [json.dumps(event) for event in events] + ["[DONE]"]
    body = "".join(f"data: {line}\n\n" for line in lines)
    return b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + body.encode()


def test_an_endpoint_under_load(server: Server) -> None:
    endpoint = Endpoint(
        url=f"{server.url}/v1", model="bytes", chat=True, body={"max_tokens": 8, "branches": 1}
    )
    load = summarise(asyncio.run(offer(endpoint, ["Hello", "You"], rates=[10], seconds=1, seed=0)))
    assert load.requests == load.completed > 3
    assert load.tokens_per_second * load.seconds == pytest.approx(8 * load.completed)
    assert 0 < load.first_text["p50"] <= load.latency["p50"] <= load.latency["p99"]
    assert load.branches is not None
    assert 0 < load.branches <= 1
    assert load.server_errors == 0
    assert 0 < load.client_busy < 1.5


@pytest.mark.parametrize(
    ("response", "status", "error"),
    [
        (b"HTTP/1.1 429 Busy\r\nContent-Length: 4\r\n\r\nfull", 429, "full"),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\ndata: {}\n\n", 200, "broke off"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\ndata: {}\n", 200, "Error"),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\ndata: {\n", 200, "Error"),
        (b"no HTTP", 0, "Error"),
        (b"", 0, "Error"),
        (_stream_of({"padding": "x" * 300_000}, {"usage": {"completion_tokens": 5}}), 200, None),
        (_stream_of({"error": {"message": "lost"}}), 200, "lost"),
        (_stream_of({"padding": "x" * 3_000_000}), 200, "TooLong"),
        (_stream_of([]), 200, "Error"),
        (_stream_of({"choices": [None]}), 200, "Error"),
        (b"HTTP/1.1 302 Found\r\nLocation: /v2\r\nContent-Length: 0\r\n\r\n", 302, ""),
    ],
)
def test_what_an_endpoint_may_answer(
    response: bytes, status: int, error: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(response)
        await writer.drain()
        writer.close()

    async def ask() -> Answer:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            endpoint = Endpoint(url=f"http://127.0.0.1:{port}/v1", model="m", body={})
            (only,) = await offer(endpoint, ["Hello"], rates=[1], seconds=0.01, seed=0)
            return only.answers[0]

    monkeypatch.setattr(serve_load, "arrivals", lambda *_: [0.0])
    found = asyncio.run(ask())
    assert found.status == status
    assert (found.error is None) if error is None else (error in str(found.error))
    assert found.complete == (error is None)
    assert found.tokens == (5 if error is None else 0)


def test_answers_are_in_the_order_of_the_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask(client: object, endpoint: Endpoint, prompt: str, due: float) -> Answer:
        await asyncio.sleep(0.02 * (5 - int(prompt)))  # the last ones are answered first
        return Answer(tokens=int(prompt))

    monkeypatch.setattr(serve_load, "_ask", ask)
    prompts = [str(number) for number in range(5)]
    offered = offer(Endpoint(url="", model="", body={}), prompts, rates=[100], seconds=0.1, seed=0)
    (only,) = asyncio.run(offered)
    numbers = [answer.tokens for answer in only.answers]
    assert len(numbers) > 5
    assert numbers == [number % 5 for number in range(len(numbers))]


def test_a_ramp_is_one_run(server: Server) -> None:
    endpoint = Endpoint(url=f"{server.url}/v1", model="bytes", body={"max_tokens": 8})
    asked = endpoint.with_fields(branches="auto", objective="tpf")
    steps = asyncio.run(offer(asked, ["Hello"], rates=[4, 16, 4], seconds=0.5, seed=0))
    loads = [summarise([step]) for step in steps]
    assert [load.offered for load in loads] == [4, 16, 4]
    due = [arrivals(rate, 0.5, seed) for seed, rate in enumerate((4, 16, 4))]
    assert [load.requests for load in loads] == [len(times) for times in due]
    assert all(load.completed == load.requests and not load.server_errors for load in loads)


@pytest.mark.soak
def test_the_command(server: Server, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    url = ["bench", "serve", "--url", f"{server.url}/v1/"]
    short = ["--seconds", "0.2", "--max-tokens", "8"]
    assert main([*url, *short, "--rates", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["model"] == "bytes"
    assert found["loads"][0]["offered"] == 4.0
    assert main([*url, *short, "--rates", "2,4"]) == 0
    assert "first text" in capsys.readouterr().out
    compare = ["--ramp", "--rates", "2,4", "--branches", "auto,1", "--runs", "2"]
    picture = ["--picture", str(tmp_path / "ramp.png")]
    assert main([*url, *short, *compare, *picture, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert all(one["ratio"] > 0 for one in found["auto_over_envelope"])
    loads = found["loads"]
    assert [load["offered"] for load in loads] == [2, 4, 2] * 2
    assert [load["asked"] for load in loads] == ["auto"] * 3 + ["1"] * 3
    requests = [load["requests"] for load in loads]  # the same arrivals for both numbers
    assert requests[:3] == requests[3:]
    assert min(requests) >= 2  # in two runs
    assert (tmp_path / "ramp.png").stat().st_size > 5000
    for wrong in (["--branches", "x"], ["--rates", "x"], ["--rates", "-1"], ["--body", "[]"]):
        assert main([*url, *wrong]) == 2
    assert main(["bench", "serve", "--url", "http://127.0.0.1:1/v1"]) == 1
    assert "does not answer" in capsys.readouterr().err


def test_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    answers = [Answer(status=200, first_text=0.1, seconds=1.0, tokens=5)]
    loads = [summarise([Offered(rate, answers, 1.0)]) for rate in (1.0, 2.0)]
    plot_load(loads, str(tmp_path / "load.png"))
    assert (tmp_path / "load.png").stat().st_size > 5000
