"""The API's side of an engine process: starts it, feeds it, and starts it again when it dies.

A request is accepted when there is room for it, and then it is answered: if the process dies it is
submitted again, in its order. A job that was running when several engines in a row died, and that
got no further in between, is under suspicion: suspects are run one by one, so that the one at fault
takes nobody else with it, and a job that has cost too many engines is given up.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from dataclasses import asdict
from typing import Any

from lopa.serving.api.errors import check_room, loading, shutting_down
from lopa.serving.api.request_state import Flow, Observer, Sink
from lopa.serving.config import EngineConfig
from lopa.serving.ipc import frame, receive
from lopa.serving.jobs import Failed, Finished, Job, unpack

MAX_ATTEMPTS = 5  # engines that one job may cost
SUSPECT_AFTER = 2
_PATIENCE = 3  # starts in a row that may fail before waiting requests are told
_SLOWEST_RESTART = 10.0  # seconds between starts that fail
_GOODBYE = 2.0  # seconds that an engine has for going by itself
_LOOK_EVERY = 1.0  # seconds between looks at whether the engine is stuck
_RECENT = 64  # answers whose time makes the estimate for Retry-After

log = logging.getLogger("lopa.serving")


class Client:
    """One engine process. Use on one event loop only."""

    def __init__(
        self,
        config: EngineConfig,
        observer: Observer,
        *,
        max_queue: int,
        stall_seconds: float,
        module: str = "lopa.serving.engine_process.worker",  # run as the engine process
    ) -> None:
        self.config = config
        self.max_queue = max_queue
        self.stall_seconds = stall_seconds
        self.state = "loading"  # then ready, restarting, failed, draining, stopped
        self.engine: dict[str, Any] = {}  # what the engine said about itself
        self._gauges: dict[str, Any] = {}  # what it said last
        self.restarts = 0
        self.pid: int | None = None
        self.failure: tuple[str, bool] | None = None  # why the first start failed; was it misuse
        self.gave_up = asyncio.Event()  # the first start failed
        self._module = module
        self._observer = observer
        self._flows: dict[str, Flow] = {}  # accepted and not ended, oldest first
        self._writer: asyncio.StreamWriter | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._heard = time.monotonic()
        self._up = False  # the engine that runs now is ready
        self._draining = False
        self._recent: deque[float] = deque(maxlen=_RECENT)

    # -- what routes use ----------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        return self._up and not self._draining

    @property
    def capacity(self) -> int:
        return int(self.engine.get("max_running", 0)) + self.max_queue

    def flows(self) -> list[Flow]:
        return list(self._flows.values())

    def submit(self, jobs: list[Job], sink: Sink) -> list[Flow]:
        if self._draining:
            raise shutting_down()
        if not self.engine:
            raise loading()
        check_room(len(jobs), len(self._flows), self.capacity, self._retry_after())
        flows = [Flow(job, i, sink, self._observer) for i, job in enumerate(jobs)]
        self._flows.update((flow.job.id, flow) for flow in flows)
        self._pump()
        return flows

    def drop(self, flow: Flow) -> None:
        if self._flows.pop(flow.job.id, None) is not None and flow.submitted:
            self._send("abort", flow.job.id)
            self._pump()

    async def refresh(self) -> None:
        """The engine tells by itself."""

    def gauges(self) -> dict[str, float | None]:
        """What `/metrics` shows of the engine as it is."""
        running = sum(flow.running for flow in self._flows.values())
        used, pages = self._gauges.get("pages") or (None, None)
        return {
            "ready": self.ready,
            "requests_running": running,
            "requests_waiting": len(self._flows) - running,
            "ranks_alive": self._gauges.get("ranks", 0) if self._up else 0,
            "engine_restarts": self.restarts,
            "cache_tokens": self._gauges.get("cache_tokens", 0),
            "cache_pages_used": used,
            "cache_pages": pages,
        }

    def drain(self) -> None:
        self._draining = True
        self.state = "draining"

    # -- the process --------------------------------------------------------------------------

    async def start(self) -> None:
        self._supervisor = asyncio.create_task(self._supervise())

    async def stop(self) -> None:
        self.drain()
        self.fail_all(Failed(kind="shutdown", message="the server is shutting down"))
        if self._supervisor is not None:
            self._supervisor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._supervisor
        self.state = "stopped"

    def fail_all(self, failed: Failed) -> None:
        for flow in self.flows():
            self._end(flow, failed)

    async def _supervise(self) -> None:
        failures = 0
        while True:
            self._up = False
            error = await self._run_once()
            if self._up:
                failures = 0
            self._up = False
            if error is not None and not self.engine:
                self.failure, self.state = error, "failed"
                self.gave_up.set()
                return
            failures += 1
            self.restarts += 1
            if not self._draining:
                self.state = "restarting" if failures < _PATIENCE else "failed"
            log.error(
                "engine lost",
                extra={"reason": error[0] if error else "the process died", "starts": failures},
            )
            self._take_back()
            if failures >= _PATIENCE:
                self.fail_all(Failed(kind="engine", message="the engine does not start"))
            if failures > 1:  # it died before it was ready
                await asyncio.sleep(min(0.5 * 2**failures, _SLOWEST_RESTART))

    async def _run_once(self) -> tuple[str, bool] | None:
        """Run a process to its end; why it could not start, if it said so."""
        ours, theirs = socket.socketpair()
        with theirs:
            # Not asyncio's: not every event loop can wait for processes outside the main thread.
            process = subprocess.Popen(
                [sys.executable, "-m", self._module, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # a terminal's Ctrl-C is for the API to handle
            )
        self.pid = process.pid
        ours.setblocking(False)
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        stuck = asyncio.create_task(self._watch_for_stall())
        try:
            writer.write(frame(self._settings()))
            while (message := await receive(reader)) is not None:
                self._heard = time.monotonic()
                if "log" in message:
                    log.warning("engine note", extra={"note": message["log"]})
                if "failed" in message:
                    return message["failed"], bool(message["misuse"])
                if "ready" in message:
                    self._is_up(message["ready"], writer)
                self._gauges = message.get("engine", self._gauges)
                for job_id, *packed in message.get("events", ()):
                    self._take(job_id, packed)
            return None
        finally:
            self._writer = None
            stuck.cancel()
            writer.close()  # which tells it to go; it may be in the middle of a long round
            await asyncio.to_thread(_end, process)

    def _settings(self) -> dict[str, Any]:
        """For an engine. What the first one measured holds for the next, or `branches="auto"`
        would have jobs that are submitted again take another course."""
        settings = asdict(self.config)
        if cost := self.engine.get("round_cost"):
            settings["llm"].setdefault("round_cost", cost)
        return settings

    def _is_up(self, engine: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        self.engine = engine
        self._writer = writer
        self._up = True
        if not self._draining:
            self.state = "ready"
        log.info("engine ready", extra={"pid": self.pid, "device": engine.get("device")})
        self._pump()

    def _take(self, job_id: str, packed: list[Any]) -> None:
        flow = self._flows.get(job_id)
        if flow is None:
            return  # dropped in the meantime
        event = unpack(packed)
        if isinstance(event, Finished | Failed):
            self._end(flow, event)
            return
        flow.take(event)
        if flow.end is not None:  # it could not be carried on
            self.drop(flow)

    def _end(self, flow: Flow, event: Finished | Failed) -> None:
        flow.take(event)
        self._flows.pop(flow.job.id, None)
        if isinstance(event, Finished):
            self._recent.append(flow.seconds)
        self._pump()

    def _take_back(self) -> None:
        """The engine is gone: what it had is to be submitted again."""
        had = [flow for flow in self.flows() if flow.submitted]
        for flow in had[: self.engine.get("max_running")]:  # the others had not begun
            flow.attempts += 1
        for flow in had:
            flow.again()
            if flow.attempts >= MAX_ATTEMPTS:
                message = f"the engine failed {flow.attempts} times while it worked on this request"
                self._end(flow, Failed(kind="engine", message=message))

    def _pump(self) -> None:
        """Give the engine what it may have now."""
        if self._writer is None:
            return
        suspects = [f for f in self._flows.values() if f.attempts >= SUSPECT_AFTER]
        if suspects:
            if any(flow.submitted for flow in self._flows.values()):
                return
            todo = suspects[:1]
        else:
            todo = [flow for flow in self._flows.values() if not flow.submitted]
        for flow in todo:
            flow.give()
            self._send("submit", asdict(flow.job))

    def _send(self, verb: str, what: Any) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(frame([verb, what]))

    async def _watch_for_stall(self) -> None:
        while True:
            await asyncio.sleep(min(_LOOK_EVERY, self.stall_seconds / 4))
            busy = self._up and any(flow.submitted for flow in self._flows.values())
            if not busy:
                self._heard = time.monotonic()
            elif time.monotonic() - self._heard > self.stall_seconds and self.pid is not None:
                log.error("engine stuck", extra={"pid": self.pid, "seconds": self.stall_seconds})
                self._heard = time.monotonic()
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)

    def _retry_after(self) -> int:
        """Seconds until there is likely to be room: what an answer takes, over those at once."""
        if not self._recent:
            return 1
        usual = sum(self._recent) / len(self._recent)
        return max(1, min(60, math.ceil(usual / int(self.engine["max_running"]))))


def _end(process: subprocess.Popen[bytes]) -> None:
    """See a process out, and whatever it has started."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_GOODBYE)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
