"""A hundred faults under load: nothing is lost, mixed up or answered 500, and health is right.

Engines and ranks are killed and stopped, and starts are interrupted. A thread asks `/health` four
times a second and compares the answer with what is true of the processes. The timeline is printed
(pytest -s): a letter per second for the state, and one for each fault. With LOPA_FAULT_SHARE=3
every third of them is done.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from hammer import Cases, Tally, hammer
from serving_support import Server, children, is_alive, until

from lopa import LLM

pytestmark = pytest.mark.soak

HEALTH = 3.0  # seconds: the server's option; longer than a round on a machine that others use
GRACE = 2.0  # seconds more until health must be right: a slow machine's rounds may take long
MODEL = "dummy:dream-tiny"
ONE = ("--model", MODEL, "--device", "cpu")
RANKS = (*ONE, "--branch-parallel", "2", "--rank-timeout", "2")
SHARE = int(os.environ.get("LOPA_FAULT_SHARE", "1"))  # one of so many is done
LETTERS = {"ready": ".", "restarting": "r", "unresponsive": "u"}


class Watch:
    """Asks for health and knows when the engine was lost, and when it was back."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.began = time.monotonic()
        self.samples: list[tuple[float, int, str]] = []
        self.faults: list[tuple[float, str]] = []
        self.wrong: list[str] = []
        self._lost_at: float | None = None  # None while nothing is wrong
        self._dead = False  # lost for certain, until it is back
        self._engine = server.engine_pid  # when it was lost
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    @contextmanager
    def fault(self, letter: str, dead: bool) -> Iterator[None]:
        """Of the inside: `dead` when no round can run, else it may or may not."""
        with self._lock:
            self.faults.append((time.monotonic() - self.began, letter))
            self._lost_at, self._dead = time.monotonic(), dead
            self._engine = self.server.engine_pid
        yield
        with self._lock:
            self._lost_at, self._dead = None, False

    def revived(self) -> None:
        with self._lock:
            self._dead = False

    def _is_back(self, lost: int) -> bool:
        """Whether the next engine is ready; the log may be a little behind."""
        self._done.wait(1)
        return self.server.engine_pid != lost

    def _run(self) -> None:
        right_at = time.monotonic()  # when health was last asked and not wrong
        with httpx.Client(base_url=self.server.url, timeout=60) as client:
            while not self._done.wait(0.25):
                with self._lock:
                    before = (self._lost_at, self._dead, self._engine)
                asked = time.monotonic()
                response = client.get("/health")
                state = response.json()["state"]
                with self._lock:
                    after = (self._lost_at, self._dead, self._engine)
                self.samples.append((asked - self.began, response.status_code, state))
                lost_at, dead, engine = after
                if before != after or lost_at is not None or response.status_code == 200:
                    right_at = asked
                elif asked - right_at > GRACE:
                    self.wrong.append(f"{asked - self.began:.1f} s: {state}, but it is up")
                if before != after:
                    continue  # it changed while the answer was on its way
                late = lost_at is not None and asked - lost_at > HEALTH + GRACE
                if dead and late and response.status_code == 200 and not self._is_back(engine):
                    self.wrong.append(f"{asked - self.began:.1f} s: {state}, but it is lost")

    def timeline(self) -> str:
        seconds = int(time.monotonic() - self.began) + 1
        states, marks = [" "] * seconds, [""] * seconds
        for at, _, state in self.samples:
            if states[int(at)] in (" ", "."):
                states[int(at)] = LETTERS.get(state, "?")
        for at, letter in self.faults:
            marks[int(at)] += letter
        lines = []
        for begin in range(0, seconds, 60):
            faults = " ".join(
                f"{second}:{mark}" for second, mark in enumerate(marks[begin : begin + 60], begin)
                if mark
            )  # fmt: skip
            lines.append(f"{begin:4} s  {''.join(states[begin : begin + 60])}  {faults}")
        return "\n".join(lines)


def engine_of(server: Server) -> int | None:
    """The engine process, ready or not."""
    found = children(server.process.pid)
    return found[0] if found else None


def ranks_of(server: Server) -> list[int]:
    return [pid for fork_server in children(server.engine_pid) for pid in children(fork_server)]


def recovered(server: Server, lost: int) -> None:
    until(lambda: server.engine_pid != lost, server)
    until(lambda: server.ready, server)


def kill_engine(server: Server, watch: Watch, draw: random.Random) -> None:
    lost = server.engine_pid
    os.kill(lost, signal.SIGKILL)
    recovered(server, lost)
    assert not is_alive(lost)


def interrupt_start(server: Server, watch: Watch, draw: random.Random) -> None:
    lost = server.engine_pid
    os.kill(lost, signal.SIGKILL)
    second = until(lambda: (pid := engine_of(server)) and pid != lost and pid, server)
    time.sleep(draw.uniform(0, 0.7))
    os.kill(second, signal.SIGKILL)
    recovered(server, lost)


def stop_engine(server: Server, watch: Watch, draw: random.Random) -> None:
    pid = server.engine_pid
    os.kill(pid, signal.SIGSTOP)
    time.sleep(HEALTH + GRACE + 1)
    watch.revived()
    os.kill(pid, signal.SIGCONT)
    until(lambda: server.ready, server)


def stop_engine_for_good(server: Server, watch: Watch, draw: random.Random) -> None:
    lost = server.engine_pid
    os.kill(lost, signal.SIGSTOP)
    recovered(server, lost)
    assert not is_alive(lost)


def kill_rank(server: Server, watch: Watch, draw: random.Random) -> None:
    _lose_rank(server, draw, signal.SIGKILL)


def stop_rank(server: Server, watch: Watch, draw: random.Random) -> None:
    _lose_rank(server, draw, signal.SIGSTOP)


def _lose_rank(server: Server, draw: random.Random, how: signal.Signals) -> None:
    lost = draw.choice(ranks_of(server))
    os.kill(lost, how)
    until(lambda: not is_alive(lost), server)

    def whole() -> bool:
        return len(ranks_of(server)) == 2 and server.metric("lopa_ranks_alive") == 2

    until(whole, server)
    until(lambda: server.ready, server)


Fault = tuple[str, Callable[[Server, Watch, random.Random], None], bool, int]
# Letter, what is done, whether rounds stop for certain, and how many faults it is.
KILL: Fault = ("K", kill_engine, True, 1)
INTERRUPT: Fault = ("I", interrupt_start, True, 2)
STOP: Fault = ("S", stop_engine, True, 1)
STOP_FOR_GOOD: Fault = ("G", stop_engine_for_good, True, 1)
RANK: Fault = ("k", kill_rank, False, 1)
RANK_STOP: Fault = ("s", stop_rank, False, 1)


@pytest.fixture(scope="module")
def cases() -> Cases:
    llm = LLM(MODEL, device="cpu")
    found = []
    for seed in range(6):
        options: dict[str, Any] = {"block_size": 8, "branches": 1 + seed % 3}
        if seed % 3 == 2:
            options |= {"temperature": 0.7, "seed": seed}
        config = llm.decode_config(**options, max_new_tokens=32)
        prompt = f"Hello {seed}"
        body = {"prompt": prompt, "max_tokens": 32, **options}
        found.append((body, llm.generate(prompt, config).text))
    return found


@pytest.mark.parametrize(
    ("options", "faults"),
    [
        (ONE, [KILL] * 7 + [INTERRUPT] * 5 + [STOP] * 3 + [STOP_FOR_GOOD]),  # 21
        (RANKS, [RANK] * 69 + [KILL] * 2 + [INTERRUPT] * 2 + [STOP] + [RANK_STOP] * 3),  # 79
    ],
    ids=["one process", "ranks"],
)
def test_faults_under_load(options: tuple[str, ...], faults: list[Fault], cases: Cases) -> None:
    draw = random.Random(0)
    faults = faults[::SHARE]
    order = draw.sample(faults, len(faults))
    tally, recoveries = Tally(), []
    limits = ("--max-running", "8", "--max-queue", "8")
    seconds = ("--health-seconds", str(HEALTH), "--stall-seconds", "8")
    with Server(*options, *limits, *seconds) as server, Watch(server) as watch:
        load = threading.Thread(
            target=lambda: asyncio.run(hammer(server.url, cases, 12, tally=tally)), daemon=True
        )
        load.start()
        for letter, act, dead, _ in order:
            answered = tally.answered
            until(lambda answered=answered: tally.answered > answered, server)  # type: ignore[misc]
            time.sleep(draw.uniform(0, 0.3))
            began = time.monotonic()
            with watch.fault(letter, dead):
                act(server, watch, draw)
            recoveries.append(time.monotonic() - began)
        tally.closed = True
        load.join()
        slots = server.slots()
    count = sum(number for *_, number in order)
    print(
        f"\nkills: {count} faults in {time.monotonic() - watch.began:.0f} s, {tally.answered} "
        f"answers, {len(tally.wrong)} wrong; recovery median {statistics.median(recoveries):.1f} "
        f"s, most {max(recoveries):.1f} s; health asked {len(watch.samples)} times, "
        f"{len(watch.wrong)} wrong\n"
        "per second: . ready, r restarting, u unresponsive; second:fault, K engine killed, I its "
        "start too, S engine stopped, G for good, k rank killed, s rank stopped\n"
        f"{watch.timeline()}\n{watch.wrong or ''}"
    )
    assert tally.wrong == []
    assert watch.wrong == []
    assert tally.answered > len(order)
    assert slots == []


def test_a_stopped_engine_and_its_ranks_end_with_the_server(tmp_path: Path) -> None:
    with Server(*RANKS) as server:
        engine, ranks = server.engine_pid, ranks_of(server)
        assert len(ranks) == 2
        for pid in (*ranks, engine):
            os.kill(pid, signal.SIGSTOP)
        server.process.kill()
        server.process.wait()
        until(lambda: not [pid for pid in (engine, *ranks) if is_alive(pid)])
