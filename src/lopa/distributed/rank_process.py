"""A rank under a supervisor: it runs the same engine as every other rank, on the same commands.

Commands come over each rank's own channel and take effect, on every rank, before the same round: a
rank says in each round how many it has heard, and those that all have heard are carried out. Rank 0
tells the supervisor what came of each round.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import numpy as np

from lopa.distributed.branch_runner import BranchParallel
from lopa.distributed.channel import Channel
from lopa.distributed.mesh import Mesh, meeting_place
from lopa.distributed.placement import settle, stay_here
from lopa.distributed.rank_llm import RankLLM, RankSession
from lopa.engine.scheduler import Engine
from lopa.engine.session import Event, Session
from lopa.errors import LopaError, RankError
from lopa.types import Plan, Stats


@dataclass(slots=True)
class Told:
    """What became of one session's round: its statistics at the wanted positions, in order."""

    session: int
    index: int  # of the round
    start: int  # of its window: behind what a new session found in the cache
    seconds: float
    token: np.ndarray[Any, np.dtype[np.int32]]
    max_prob: np.ndarray[Any, Any]
    ranking: np.ndarray[Any, Any]

    @classmethod
    def of(cls, session: int, plan: Plan, stats: Stats, seconds: float, wide: bool) -> Told:
        at, real = plan.wanted, np.float64 if wide else np.float32
        return cls(
            session,
            plan.index,
            plan.start,
            seconds,
            stats.token[at].astype(np.int32),
            stats.max_prob[at].astype(real),
            stats.ranking[at].astype(real),
        )

    def stats(self, plan: Plan) -> Stats:
        token, (max_prob, ranking) = (
            np.zeros(plan.rows.shape, np.int64),
            np.zeros((2, *plan.rows.shape)),
        )
        token[plan.wanted] = self.token
        max_prob[plan.wanted] = self.max_prob
        ranking[plan.wanted] = self.ranking
        return Stats(token, max_prob, ranking)


class _Listening(BranchParallel):
    """Keeps the plans and statistics of the round for rank 0 to tell."""

    last: Sequence[tuple[int, Plan, Stats | None]] = ()

    def forward(self, plans: Sequence[tuple[int, Plan]]) -> list[Stats | None]:
        found = super().forward(plans)
        self.last = [(slot, plan, stats) for (slot, plan), stats in zip(plans, found, strict=True)]
        return found


class _Ear(threading.Thread):
    """Takes the commands in as they come."""

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
                os._exit(0)  # the supervisor is gone, and so is the reason to be
            with self.changed:
                self.commands.append(command)
                self.changed.notify()

    def command(self, number: int) -> tuple[Any, ...]:
        """Wait for it."""
        with self.changed:
            self.changed.wait_for(lambda: len(self.commands) > number)
            return self.commands[number]


class _Voice(threading.Thread):
    """Says things in their order, and lets nobody wait for a supervisor that does not listen."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(daemon=True)
        self.channel = channel
        self.queue: SimpleQueue[tuple[Any, ...]] = SimpleQueue()

    def say(self, *message: Any) -> None:
        self.queue.put(message)

    def run(self) -> None:
        while True:
            try:
                self.channel.send(*self.queue.get())
            except OSError:
                os._exit(0)


class _Pulse(threading.Thread):
    """Says, every little while, what this rank is at and for how long. Silent while it is idle."""

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
                    self.channel.send("beat", self.phase, time.monotonic() - self.since)
                except OSError:
                    os._exit(0)
            time.sleep(self.period)


def main(orders: dict[str, Any], end: socket.socket) -> None:
    channel = Channel(end)
    pulse = _Pulse(channel, orders["period"])
    pulse.start()
    ear = _Ear(channel)
    ear.start()
    voice = _Voice(channel)
    voice.start()
    try:
        llm = _join(orders)
        pulse.enter("idle")
        voice.say("ready", llm.capacity)
        _serve(llm, ear, pulse, voice)
    except RankError as error:
        voice.say("lost", str(error))
    except LopaError as error:
        voice.say("error", error)
    except Exception as error:
        traceback.print_exc()
        voice.say("failed", f"{type(error).__name__}: {error}")
    pulse.enter("idle")
    threading.Event().wait()  # the supervisor finds out who is to blame, and ends the others


def _join(orders: dict[str, Any]) -> RankLLM:
    stay_here()
    device = settle(orders["place"])
    mesh = Mesh.join(
        orders["rank"],
        orders["branches"] * orders["tensors"],
        branches=orders["branches"],
        tensors=orders["tensors"],
        device=device,
        backend=orders["backend"],
        timeout=orders["timeout"],
        store=meeting_place("127.0.0.1", orders["port"], is_master=False),
    )
    return RankLLM(orders["model"], mesh=mesh, runner=_Listening, **orders["options"])


def _serve(llm: RankLLM, ear: _Ear, pulse: _Pulse, voice: _Voice) -> None:
    runner = llm.runner
    assert isinstance(runner, _Listening)
    runner.heard = lambda: len(ear.commands)
    runner.entered = pulse.enter
    engine = Engine(runner)
    sessions: dict[int, RankSession] = {}
    done = 0  # commands carried out
    told: tuple[int, int] | None = None

    def tell_pages() -> None:
        nonlocal told
        held = llm.kv_cache.used_pages, llm.kv_cache.total_pages
        if llm.mesh.rank == 0 and held != told:
            voice.say("pages", held)
            told = held

    while True:
        while done < runner.agreed or not engine.busy:
            if not engine.busy:  # so is every rank: all wait for the same command
                pulse.enter("idle")
            _carry_out(ear.command(done), llm, engine, sessions)
            ear.commands[done] = ()  # only how many there were is needed from now on
            done += 1
            tell_pages()
        pulse.enter("host")
        events = engine.step()
        if llm.mesh.rank == 0:
            voice.say("round", _told(runner, events), _numbers(sessions, engine))
        for session, event in events:
            if event.output is not None:
                del sessions[session.number]  # type: ignore[attr-defined]
        tell_pages()


def _told(runner: _Listening, events: Sequence[tuple[Session, Event]]) -> list[Told]:
    found = {slot: (plan, stats) for slot, plan, stats in runner.last}
    told = []
    for session, event in events:
        assert isinstance(session, RankSession)
        plan, stats = found[session.held]
        assert stats is not None
        wide = session.config.decoder == "fast-dllm"
        told.append(Told.of(session.number, plan, stats, event.round.seconds, wide))
    return told


def _numbers(sessions: dict[int, RankSession], engine: Engine) -> list[int]:
    """Of the sessions that run."""
    running = {id(session) for session in engine.running}
    return [number for number, session in sessions.items() if id(session) in running]


def _carry_out(
    command: tuple[Any, ...], llm: RankLLM, engine: Engine, sessions: dict[int, RankSession]
) -> None:
    kind, *rest = command
    if kind == "limits":
        engine.max_running, engine.token_budget = rest
    elif kind == "add":
        number, prompt, config, limit, decoder, replays = rest
        session = llm.session(prompt, config, limit=limit)
        assert isinstance(session, RankSession)
        if decoder is not None:
            session.restore(decoder, replays)
        sessions[number], session.number = session, number
        engine.add(session)
    elif kind == "abort":
        gone = sessions.pop(rest[0], None)
        if gone is not None:
            engine.abort(gone)
