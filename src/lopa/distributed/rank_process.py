"""A rank under a supervisor: it runs the same scheduler as every other rank, on the same commands.

Commands come over each rank's own channel and take effect, on every rank, before the same round: a
rank says in each round how many it has received, and those that all have received are carried out.
Rank 0 reports to the supervisor what came of each round.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from lopa.decoding.decoder import Decoder
from lopa.distributed.channel import Channel
from lopa.distributed.mesh import Mesh, make_store
from lopa.distributed.placement import DevicePlacement, pin_process, use_loopback
from lopa.distributed.rank_llm import RankLLM
from lopa.engine.output import Event
from lopa.engine.session import Session
from lopa.errors import LopaError, RankError
from lopa.models.tokenizer import Tokenizer
from lopa.types import Plan, Stats

_PROGRESS_SECONDS = 0.1  # between reports of loading


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOrders:
    """What a rank is started with."""

    model: str
    options: dict[str, Any]  # of `LLM`
    rank: int
    branch_parallel: int
    tensor_parallel: int
    placement: DevicePlacement
    backend: str
    port: int  # of the store where the ranks meet
    timeout: float  # seconds, of collectives
    heartbeat_seconds: float


@dataclass(slots=True)
class RoundResult:
    """What came of one session's round."""

    session: int
    index: int  # of the round
    start: int  # of its window: behind what a new session found in the cache
    branches: int  # that the ranks' scheduler gave it
    seconds: float
    stats: Stats


class ReportedSession(Session):
    """A session that keeps the statistics of its round for rank 0 to report."""

    def __init__(
        self, number: int, decoder: Decoder, tokenizer: Tokenizer | None, replay: Sequence[Plan]
    ) -> None:
        super().__init__(decoder, tokenizer, replay=replay)
        self.number = number  # the supervisor's
        self.result: RoundResult | None = None

    def choose(self, stats: Stats) -> int:
        plan = self.plan()
        assert plan is not None
        branches = len(plan.rows) - 1
        self.result = RoundResult(self.number, plan.index, plan.start, branches, 0.0, stats)
        return super().choose(stats)


class CommandReader(threading.Thread):
    """Receives the commands as they come."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(daemon=True)
        self.channel = channel
        self.commands: list[tuple[Any, ...]] = []
        self.changed = threading.Condition()

    def run(self) -> None:
        while True:
            try:
                command = self.channel.receive()
            except (EOFError, OSError):
                os._exit(0)  # the supervisor is gone
            with self.changed:
                self.commands.append(command)
                self.changed.notify()

    def command(self, number: int) -> tuple[Any, ...]:
        """Wait for it."""
        with self.changed:
            self.changed.wait_for(lambda: len(self.commands) > number)
            return self.commands[number]


class MessageWriter(threading.Thread):
    """Sends messages in their order; nothing waits for a supervisor that does not read."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(daemon=True)
        self.channel = channel
        self.queue: SimpleQueue[tuple[Any, ...]] = SimpleQueue()

    def send(self, *message: Any) -> None:
        self.queue.put(message)

    def run(self) -> None:
        while True:
            try:
                self.channel.send(*self.queue.get())
            except OSError:
                os._exit(0)


class Heartbeat(threading.Thread):
    """Tells the supervisor what this rank is at and for how long. Silent while it is idle."""

    def __init__(self, channel: Channel, period: float) -> None:
        super().__init__(daemon=True)
        self.channel, self.period = channel, period
        self.phase, self.since = "starting", time.monotonic()

    def enter(self, phase: str) -> None:
        self.phase, self.since = phase, time.monotonic()

    def run(self) -> None:
        while True:
            if self.phase != "idle":
                try:
                    self.channel.send("heartbeat", self.phase, time.monotonic() - self.since)
                except OSError:
                    os._exit(0)
            time.sleep(self.period)


def main(orders: RankOrders, end: socket.socket) -> None:
    channel = Channel(end)
    heartbeat = Heartbeat(channel, orders.heartbeat_seconds)
    reader, writer = CommandReader(channel), MessageWriter(channel)
    for thread in (heartbeat, reader, writer):
        thread.start()
    try:
        llm = _load(orders, heartbeat, writer)
        heartbeat.enter("idle")
        writer.send("ready", llm.capacity)
        RankLoop(llm, reader, heartbeat, writer).run()
    except RankError as error:
        writer.send("lost", str(error))
    except LopaError as error:
        writer.send("error", error)
    except Exception as error:
        traceback.print_exc()
        writer.send("failed", f"{type(error).__name__}: {error}")
    heartbeat.enter("idle")
    threading.Event().wait()  # the supervisor finds out who is to blame, and ends the others


def _load(orders: RankOrders, heartbeat: Heartbeat, writer: MessageWriter) -> RankLLM:
    use_loopback()
    reported = time.monotonic()

    def progress(done: int, total: int) -> None:
        nonlocal reported
        heartbeat.enter("loading")  # a large model takes long, but not one tensor of it
        now = time.monotonic()
        if orders.rank == 0 and (done == total or now - reported > _PROGRESS_SECONDS):
            reported = now
            writer.send("loading", done, total)

    mesh = Mesh.join(
        orders.rank,
        orders.branch_parallel * orders.tensor_parallel,
        branch_parallel=orders.branch_parallel,
        tensor_parallel=orders.tensor_parallel,
        device=pin_process(orders.placement),
        backend=orders.backend,
        timeout=orders.timeout,
        store=make_store("127.0.0.1", orders.port, is_master=False),
    )
    return RankLLM(orders.model, mesh=mesh, progress=progress, **orders.options)


class RankLoop:
    """Commands, then a round, for ever."""

    def __init__(
        self, llm: RankLLM, reader: CommandReader, heartbeat: Heartbeat, writer: MessageWriter
    ) -> None:
        self.llm, self.reader, self.heartbeat, self.writer = llm, reader, heartbeat, writer
        self.is_first = llm.mesh.rank == 0  # which reports
        self.runner = llm.runner
        self.runner.commands_received = lambda: len(reader.commands)
        self.runner.on_phase = heartbeat.enter
        # The supervisor submits no more sessions than its engines may run.
        self.engine = llm.engine(max_running=sys.maxsize)
        self.sessions: dict[int, ReportedSession] = {}
        self.done = 0  # commands carried out
        self.reported_pages: tuple[int, int] | None = None

    def run(self) -> None:
        while True:
            while self.done < self.runner.commands_agreed or not self.engine.busy:
                if not self.engine.busy:  # so is every rank: all wait for the same command
                    self.heartbeat.enter("idle")
                self._carry_out(self.reader.command(self.done))
                self.reader.commands[self.done] = ()  # only how many there were is needed
                self.done += 1
                self._report_pages()
            self.heartbeat.enter("host")
            self._report(self.engine.step())
            self._report_pages()

    def _carry_out(self, command: tuple[Any, ...]) -> None:
        kind, *rest = command
        if kind == "token_budget":
            (self.engine.token_budget,) = rest
        elif kind == "add":
            number, decoder, replay = rest
            session = ReportedSession(number, decoder, self.llm.tokenizer, replay)
            self.sessions[number] = session
            self.engine.add(session)
        elif kind == "abort":
            gone = self.sessions.pop(rest[0], None)
            if gone is not None:
                self.engine.abort(gone)
        elif kind == "round_cost":
            self._report_cost(*rest)

    def _report_cost(self, anew: bool) -> None:
        """Measured by all ranks together, or as it is kept on disk; None: it is not."""
        if anew:
            self.llm.measure_round_cost()
        cost = self.llm.round_cost if self.llm.knows_round_cost else None
        if self.is_first:
            self.writer.send("round_cost", cost)

    def _report(self, events: Sequence[tuple[Session, Event]]) -> None:
        results = []
        for session, event in events:
            assert isinstance(session, ReportedSession)
            assert session.result is not None
            session.result.seconds = event.round.seconds
            results.append(session.result)
            if event.output is not None:
                del self.sessions[session.number]
        if self.is_first:
            running = [n for n, session in self.sessions.items() if session in self.engine.running]
            self.writer.send("round", results, running)

    def _report_pages(self) -> None:
        pages = self.engine.kv_pages
        if self.is_first and pages != self.reported_pages:
            self.writer.send("kv_pages", pages)
            self.reported_pages = pages
