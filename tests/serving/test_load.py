"""Four times the load that can be served, and what the API adds to a request under it.

Run by itself (see the Makefile), so that the clock tells something of the server.
LOPA_SOAK_SECONDS is how long the load lasts. What is measured is printed (pytest -s).
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from hammer import Cases, hammer
from serving_support import Server

pytestmark = pytest.mark.soak

SECONDS = float(os.environ.get("LOPA_SOAK_SECONDS", "30"))
CLIENTS = 64
OVERHEAD = 0.005  # seconds that the API may add to a request; an edge of the metric's buckets
QUIET = 0.9  # share of the processors that others must leave for the clock to count
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
    # What others do to the clock they do not do to the processor's own time.
    assert own < OVERHEAD
    assert answers == tally.answered
    assert quick > answers / 2 or used.left_by_others < QUIET
