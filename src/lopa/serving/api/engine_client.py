"""The API's side of an engine process: starts it, submits jobs to it, and restarts it when it dies.

When the engine process dies `_run_once` returns, and `_supervise` restarts it. `_requeue` marks
the jobs that it had, and `_submit_waiting` submits them to the next one, in their order;
`RequestState` hides the rounds that were reported before. A job that was running when
`SUSPECT_AFTER` engines in a row died, without progress in between, runs alone, so that it takes no
other job with it; after `MAX_ATTEMPTS` it fails.

`_watch` pings the engine. Its main thread answers between rounds, and while the model is loaded
another thread does. An engine that is silent for `health_seconds` is not ready; one that is silent
for `stall_seconds` is killed, and then the same happens.

Capacity is checked in `submit`: a job is accepted while fewer than `max_running` + `max_queue` are
in progress. `RetryAfter` estimates the `Retry-After` of the 429.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from typing import Any

from lopa.serving.api.errors import check_capacity, error_for, loading, shutting_down
from lopa.serving.api.request_state import Observer, RequestState, Sink
from lopa.serving.api.retry_after import RetryAfter
from lopa.serving.config import HEALTH_SECONDS, EngineConfig
from lopa.serving.ipc import frame, receive
from lopa.serving.jobs import Failed, Finished, Job, prompt_characters, unpack

MAX_ATTEMPTS = 5  # engines lost while a job ran, after which it fails
SUSPECT_AFTER = 2  # engines lost while a job ran, after which it runs alone
_MAX_LOSSES = 3  # engines lost in a row, none ready in between, before requests may fail
_MAX_RESTART_DELAY_SECONDS = 10.0
_EXIT_SECONDS = 2.0  # for the process to exit by itself before it is killed
_PING_SECONDS = 1.0
_FIRST_BEAT_SECONDS = 60.0  # at least, for a process to begin its start
_ROUND_MAX_AGE_SECONDS = 1.0  # of the result of a round that health asked for

log = logging.getLogger("lopa.serving")


class EngineClient:
    """A backend of one engine process. Use it on one event loop only."""

    def __init__(
        self,
        config: EngineConfig,
        observer: Observer,
        *,
        max_queue: int,
        stall_seconds: float,
        health_seconds: float = HEALTH_SECONDS,
        module: str = "lopa.serving.engine_process.worker",  # run as the engine process
    ) -> None:
        self.config = config
        self.max_queue = max_queue
        self.stall_seconds = stall_seconds
        self.health_seconds = health_seconds
        self.engine: dict[str, Any] = {}  # the engine's description of itself; empty until ready
        self.restarts = 0
        self.pid: int | None = None
        self.start_error: tuple[str, bool] | None = None  # (message, is a wrong option)
        self.start_failed = asyncio.Event()  # of the first start
        self._module = module
        self._observer = observer
        self._requests: dict[str, RequestState] = {}  # accepted and not ended, oldest first
        self._engine_gauges: dict[str, Any] = {}  # as last reported
        self._writer: asyncio.StreamWriter | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._phase = "loading"  # then ready, restarting, failed, draining, stopped
        self._silent_seconds = 0.0  # since the engine's last sign of life
        self._engine_ready = False
        self._losses = 0  # engines in a row, since the last that was ready
        self._lost_at = time.monotonic()  # the last that was ready
        self._draining = False
        self._retry_after = RetryAfter()
        self._round: asyncio.Future[str] | None = None  # asked for; its error, or an empty text
        self._round_check: tuple[float, asyncio.Task[str]] | None = None  # and when it began

    # -- for routes ---------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        return self.state == "ready"

    @property
    def state(self) -> str:
        """Of `/health`."""
        if self._phase == "ready" and self._silent_seconds >= self.health_seconds:
            return "unresponsive"
        return self._phase

    @property
    def capacity(self) -> int:
        return int(self.engine.get("max_running", 0)) + self.max_queue

    def requests(self) -> list[RequestState]:
        return list(self._requests.values())

    def submit(self, jobs: list[Job], sink: Sink) -> list[RequestState]:
        if self._draining:
            raise shutting_down(self._retry_after.for_shutdown())
        if not self.engine:
            raise loading(self._retry_after.for_start())
        if self._phase == "failed":
            raise error_for(self._unavailable())
        in_progress = len(self._requests)
        check_capacity(len(jobs), in_progress, self.capacity, self._seconds_until_ended)
        requests = [RequestState(job, i, sink, self._observer) for i, job in enumerate(jobs)]
        for request in requests:
            given = {"prompt": request.job.prompt, "suffix": request.job.suffix or ""}
            faults = {name: fault for name, x in given.items() if (fault := self._too_long(x))}
            if faults:
                param, message = next(iter(faults.items()))
                request.handle(Failed(kind="invalid", message=message, param=param))
            else:
                self._requests[request.job.id] = request
        self._submit_waiting()
        return requests

    def _too_long(self, prompt: Any) -> str | None:
        """What is wrong with a prompt that cannot fit, by its length alone.

        A chat is measured by its messages, even if its template leaves some of their text out.
        """
        tokens, most = self.engine["max_request_tokens"], self.engine["max_prompt_characters"]
        characters = prompt_characters(prompt)
        if not isinstance(prompt, str) and len(prompt) > tokens:
            found = f"{len(prompt)} parts"
        elif characters is not None and most is not None and characters > most:
            found = f"{characters} characters, {characters - most} more than so many tokens hold,"
        else:
            return None
        return f"the prompt has {found} and a request may hold {tokens} tokens here: shorten it"

    def _seconds_until_ended(self, count: int) -> int:
        return self._retry_after.for_capacity(
            count, int(self.engine["max_running"]), self._engine_ready
        )

    def _unavailable(self) -> Failed:
        return Failed(
            kind="unavailable",
            message="the engine does not start: try again later",
            retry_after=self._retry_after.for_start(),
        )

    def abort(self, request: RequestState) -> None:
        if self._requests.pop(request.job.id, None) is not None and request.submitted:
            self._send("abort", request.job.id)
            self._submit_waiting()

    async def refresh(self) -> None:
        """Nothing to do: the engine reports after every round."""

    async def check_round(self) -> str:
        """Ask the engine for a round; returns what is wrong, or an empty text.

        Callers at the same time share it: health needs no key, and must not cost more than this.
        """
        now = time.monotonic()
        if self._round_check is None or (
            self._round_check[1].done() and now - self._round_check[0] > _ROUND_MAX_AGE_SECONDS
        ):
            self._round_check = (now, asyncio.create_task(self._ask_for_round()))
        return await asyncio.shield(self._round_check[1])

    async def _ask_for_round(self) -> str:
        if not self._engine_ready:
            return "there is no engine"
        self._round = asyncio.get_running_loop().create_future()
        self._send("round", None)
        try:
            async with asyncio.timeout(self.health_seconds):
                return await self._round
        except TimeoutError:
            return f"no round within {self.health_seconds:g} seconds"
        finally:
            self._round = None

    def gauges(self) -> dict[str, float | None]:
        running = sum(request.running for request in self._requests.values())
        used, pages = self._engine_gauges.get("pages") or (None, None)
        return {
            "ready": self.ready,
            "requests_running": running,
            "requests_waiting": len(self._requests) - running,
            "ranks_alive": self._engine_gauges.get("ranks", 0) if self._engine_ready else 0,
            "engine_restarts": self.restarts,
            "cache_tokens": self._engine_gauges.get("cache_tokens", 0),
            "cache_pages_used": used,
            "cache_pages": pages,
        }

    def drain(self, seconds: float) -> None:
        self._draining = True
        self._phase = "draining"
        self._retry_after.draining(seconds)

    # -- the process --------------------------------------------------------------------------

    async def start(self) -> None:
        self._supervisor = asyncio.create_task(self._supervise())

    async def stop(self) -> None:
        self.drain(0.0)
        self.fail_all(Failed(kind="shutdown", message="the server is shutting down"))
        if self._supervisor is not None:
            self._supervisor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._supervisor
        self._phase = "stopped"

    def fail_all(self, failed: Failed) -> None:
        for request in self.requests():
            self._finish(request, failed)

    async def _supervise(self) -> None:
        while True:
            self._retry_after.starting()
            error = await self._run_once()
            if error is not None and not self.engine:
                self.start_error, self._phase = error, "failed"
                self.start_failed.set()
                return
            self._losses += 1
            self.restarts += 1
            lost_seconds = time.monotonic() - self._lost_at
            if self._losses >= _MAX_LOSSES and lost_seconds > self.stall_seconds:
                self._change_phase("failed")
            reason = error[0] if error else "the process died"
            log.error("engine lost", extra={"reason": reason, "starts": self._losses})
            self._requeue()
            if self._losses > 1:  # it died before it was ready
                delay = min(0.5 * 2**self._losses, _MAX_RESTART_DELAY_SECONDS)
                self._retry_after.starting(delay)
                if self._phase == "failed":
                    self.fail_all(self._unavailable())
                await asyncio.sleep(delay)

    async def _run_once(self) -> tuple[str, bool] | None:
        """Run a process until it ends; returns its own report of why it could not start, if any."""
        ours, theirs = socket.socketpair()
        with theirs:
            # Not asyncio's subprocess: some event loops wait for processes in the main thread only.
            process = subprocess.Popen(
                [sys.executable, "-m", self._module, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # the API handles Ctrl-C
            )
        self.pid = process.pid
        ours.setblocking(False)
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        self._silent_seconds = 0.0
        watch = asyncio.create_task(self._watch())
        try:
            writer.write(frame(self._engine_config()))
            while (message := await receive(reader)) is not None:
                if "beat" in message:
                    self._silent_seconds = 0.0
                if "round" in message and self._round is not None and not self._round.done():
                    self._round.set_result(message["round"])
                if "log" in message:
                    log.warning("engine note", extra={"note": message["log"]})
                if "failed" in message:
                    return message["failed"], bool(message["misuse"])
                if "ready" in message:
                    self._on_ready(message["ready"], writer)
                self._engine_gauges = message.get("engine", self._engine_gauges)
                for job_id, *packed in message.get("events", ()):
                    self._handle_event(job_id, packed)
            return None
        finally:
            self._writer = None
            if self._engine_ready:
                self._engine_ready, self._losses, self._lost_at = False, 0, time.monotonic()
                self._change_phase("restarting")
            watch.cancel()
            if self._round is not None and not self._round.done():
                self._round.set_result("the engine process died")
            writer.close()  # tells the process to exit
            await asyncio.to_thread(_wait_or_kill, process)

    def _change_phase(self, phase: str) -> None:
        if not self._draining:
            self._phase = phase

    def _engine_config(self) -> dict[str, Any]:
        """The config as a message. An engine that is restarted gets the round cost that the first
        one measured; otherwise `branches="auto"` would decode submitted jobs differently."""
        config = asdict(self.config)
        if cost := self.engine.get("round_cost"):
            config["llm"].setdefault("round_cost", cost)
        return config

    def _on_ready(self, engine: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        self.engine = engine
        self._writer = writer
        self._engine_ready = True
        self._silent_seconds = 0.0
        self._retry_after.started()
        self._change_phase("ready")
        log.info("engine ready", extra={"pid": self.pid, "device": engine.get("device")})
        self._submit_waiting()

    def _handle_event(self, job_id: str, packed: list[Any]) -> None:
        request = self._requests.get(job_id)
        if request is None:
            return  # aborted in the meantime
        event = unpack(packed)
        if isinstance(event, Finished | Failed):
            self._finish(request, event)
            return
        request.handle(event)
        if request.end is not None:  # it could not be resumed
            self.abort(request)

    def _finish(self, request: RequestState, event: Finished | Failed) -> None:
        request.handle(event)
        self._requests.pop(request.job.id, None)
        if isinstance(event, Finished):
            self._retry_after.record(event)
        self._submit_waiting()

    def _requeue(self) -> None:
        """The engine is lost: its jobs wait again, or fail after too many attempts."""
        lost = [request for request in self.requests() if request.submitted]
        for request in lost[: self.engine.get("max_running")]:  # the others had not started
            request.attempts += 1
        for request in lost:
            request.restart()
            if request.attempts >= MAX_ATTEMPTS:
                message = f"the engine died {request.attempts} times while it ran this request"
                self._finish(request, Failed(kind="engine", message=message))

    def _submit_waiting(self) -> None:
        """Submit the jobs that wait: all of them, or a suspect alone."""
        if self._writer is None:
            return
        suspects = [r for r in self._requests.values() if r.attempts >= SUSPECT_AFTER]
        if suspects:
            if any(request.submitted for request in self._requests.values()):
                return
            waiting = suspects[:1]
        else:
            waiting = [request for request in self._requests.values() if not request.submitted]
        for request in waiting:
            request.mark_submitted()
            self._send("submit", request.job.message())

    def _send(self, verb: str, argument: Any) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(frame([verb, argument]))

    async def _watch(self) -> None:
        """Ping the engine, and kill it when it is silent for too long.

        Seconds are counted by the pings, so that a pause of this process is not the engine's.
        """
        seconds = min(_PING_SECONDS, self.health_seconds / 4, self.stall_seconds / 4)
        while True:
            await asyncio.sleep(seconds)
            self._silent_seconds += seconds
            if self._engine_ready:
                self._send("ping", None)
            most = self.stall_seconds
            if not self._engine_ready:
                most = max(most, _FIRST_BEAT_SECONDS)
            if self._silent_seconds > most and self.pid is not None:
                log.error("engine stuck", extra={"pid": self.pid, "seconds": most})
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)
                return  # the end of its connection tells `_run_once`


def _wait_or_kill(process: subprocess.Popen[bytes]) -> None:
    """Wait for a process to exit, then kill it and all that it started."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_EXIT_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
