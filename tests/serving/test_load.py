"""Four times the load that can be served, and what the API adds to a request under it.

Run by itself (see the Makefile), so that the times it prints say something of the server (-s).
Of times only the API's on the processor is asserted. LOPA_SOAK_SECONDS is how long the load lasts.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cli_support import write_checkpoint, write_tokenizer
from hammer import Cases, Tally, hammer, refused_long
from serving_support import Server

from lopa import LLM

pytestmark = pytest.mark.soak

SECONDS = float(os.environ.get("LOPA_SOAK_SECONDS", "30"))
CLIENTS = 64
CACHE = 8192  # tokens of the KV cache of a model with a wide context
OVERHEAD = 0.005  # seconds that the API may add to a request; an edge of the metric's buckets
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Usage:
    """Seconds of processors so far."""

    api: float
    ours: float  # the server and its clients
    busy: float  # everybody's
    clock: float

    @classmethod
    def now(cls, server: Server) -> Usage:
        times = [int(n) for n in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
        api = _processor_seconds(server.process.pid)
        ours = api + _processor_seconds(server.engine_pid) + time.process_time()
        busy = (sum(times) - times[3] - times[4]) / _TICKS
        return cls(api, ours, busy, time.monotonic())

    def __sub__(self, old: Usage) -> Usage:
        return Usage(
            self.api - old.api, self.ours - old.ours, self.busy - old.busy, self.clock - old.clock
        )

    @property
    def left_by_others(self) -> float:
        """Share of the processors that nobody else used."""
        return 1 - (self.busy - self.ours) / (self.clock * (os.cpu_count() or 1))


def _processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def resident(pid: int) -> float:
    """Memory of a process in MB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    raise AssertionError


def in_time(server: Server) -> tuple[float, float]:
    """Answers to which the API added less than it may, and all of them."""
    name = "lopa_api_overhead_seconds"
    return server.metric(f"{name}_bucket", le=str(OVERHEAD)), server.metric(f"{name}_count")


@pytest.fixture(scope="module")
def wide_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A context that a megabyte of text may fit into for all that its characters tell."""
    folder = tmp_path_factory.mktemp("wide") / "bytes"
    write_tokenizer(write_checkpoint(folder, max_position_embeddings=1 << 17))
    return folder


@pytest.fixture(scope="module")
def wide_cases(wide_folder: Path) -> Cases:
    llm = LLM(wide_folder, cache_tokens=CACHE)
    options: dict[str, Any] = {"block_size": 8, "branches": 2, "score": "mean"}
    config = llm.decode_config(**options, max_new_tokens=64)
    prompts = [f"Hello {number}" for number in range(8)]
    return [
        ({"prompt": prompt, "max_tokens": 64, **options}, llm.generate(prompt, config).text)
        for prompt in prompts
    ]


@pytest.mark.parametrize("model", ["tiny", "wide"])
def test_ordinary_clients_beside_long_prompts(model: str, request: pytest.FixtureRequest) -> None:
    """Eight clients that send a megabyte each, again and again, beside sixteen ordinary ones.

    The built-in model refuses the megabyte by its characters, the other one by its tokens.
    """
    cases: Cases = request.getfixturevalue(f"{model}_cases")
    options: tuple[str, ...] = ()
    if model == "wide":
        folder = request.getfixturevalue("wide_folder")
        options = ("--model", str(folder), "--cache-tokens", str(CACHE))
    text = ("All work and no play makes Jack a dull boy. " * 30_000)[:1_000_000]

    async def beside(url: str) -> tuple[Tally, int]:
        tally = Tally()
        long = asyncio.create_task(refused_long(url, text, 8, tally))
        await hammer(url, cases, 16, SECONDS, tally)
        tally.closed = True
        return tally, await long

    with Server("--max-running", "16", *options) as server:
        asyncio.run(hammer(server.url, cases, 16, SECONDS / 5))
        alone = asyncio.run(hammer(server.url, cases, 16, SECONDS))
        tally, refused = asyncio.run(beside(server.url))
    before, after = percentile(alone.seconds, 95), percentile(tally.seconds, 95)
    print(
        f"\nlong prompts ({model}): 16 clients, {SECONDS:.0f} s: {alone.answered} answers, p95 "
        f"{before:.3f} s; beside 8 clients whose megabyte was refused {refused} times: "
        f"{tally.answered} answers, p95 {after:.3f} s, {after / before:.2f} times as long"
    )
    assert alone.wrong == tally.wrong == []
    assert refused >= 8
    assert tally.answered > 20


def percentile(values: list[float], which: int) -> float:
    return statistics.quantiles(values, n=100)[which - 1]


def test_four_times_what_can_be_served(tiny_cases: Cases) -> None:
    with Server("--max-running", "8", "--max-queue", "8") as server:  # a quarter of the clients
        asyncio.run(hammer(server.url, tiny_cases, 8, SECONDS / 5))  # until all has its size
        pids = (server.process.pid, server.engine_pid)
        before, memory, counted = Usage.now(server), [resident(p) for p in pids], in_time(server)
        tally = asyncio.run(hammer(server.url, tiny_cases, CLIENTS, SECONDS))
        used, grown = Usage.now(server) - before, [resident(p) for p in pids]
        quick, answers = (new - old for new, old in zip(in_time(server), counted, strict=True))
        rejected, slots = server.metric("lopa_requests_rejected_total"), server.slots()
    own = used.api / (tally.answered + tally.refused)
    print(
        f"\nload: {CLIENTS} clients, {SECONDS:.0f} s: {tally.answered} answers "
        f"({tally.answered / used.clock:.1f}/s), {tally.refused} refused, {len(tally.wrong)} "
        f"wrong; memory of API and engine {memory} → {grown} MB\n"
        f"overhead: within {1e3 * OVERHEAD:.0f} ms for {quick / answers:.0%} of the answers, seen "
        f"by the clients median {1e3 * statistics.median(tally.overhead):.1f} ms; the API's "
        f"processor time {1e3 * own:.1f} ms a request; processors left by others: "
        f"{used.left_by_others:.0%}"
    )
    assert tally.wrong == []
    assert tally.answered > 20
    assert tally.refused > tally.answered / 4
    assert rejected >= tally.refused
    assert slots == []
    for old, new in zip(memory, grown, strict=True):
        assert new < old * 1.1 + 20
    # The clock depends on who else wants the processors (engine and clients do): not asserted.
    assert own < OVERHEAD
    assert answers == tally.answered
