"""The processes of one group of ranks: started, heard, found lost, ended.

A group lives until one of its ranks is lost: gone, silent, or too long at one thing. Then all of it
is ended, so that no collective has to be left in order.
"""

from __future__ import annotations

import os
import select
import selectors
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from lopa.distributed.channel import Channel
from lopa.distributed.fork_server import ForkServer
from lopa.distributed.mesh import make_store
from lopa.distributed.placement import DevicePlacement
from lopa.distributed.rank_process import RankOrders
from lopa.models.checkpoint import Progress

LOADING_FACTOR = 6.0  # timeouts that a rank has while it loads or first compiles kernels
BUSY_FACTOR, WAITING_FACTOR = 0.8, 1.5  # timeouts in one phase; in waiting for other ranks
_BLAME_SECONDS = 0.25  # to wait for a closed channel that shows which rank died

Message = tuple[Any, ...]


class LostRankError(Exception):
    def __init__(self, rank: int | None, reason: str) -> None:
        super().__init__(reason)
        self.rank, self.reason = rank, reason  # rank None: it could not be told


@dataclass(slots=True)
class RankHandle:
    """One process of the group."""

    rank: int
    pid: int
    pidfd: int  # −1 where the system has none
    channel: Channel
    last_heard: float = field(default_factory=time.monotonic)
    phase: str = "starting"
    ready: bool = False

    @property
    def is_alive(self) -> bool:
        if self.pidfd >= 0:  # readable when it has ended
            poll = select.poll()
            poll.register(self.pidfd, select.POLLIN)
            return not poll.poll(0)
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            if self.pidfd >= 0:
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            else:
                os.kill(self.pid, signal.SIGKILL)
        self.channel.close()

    def wait(self) -> None:
        """Until it is really gone: only then is its memory free."""
        if self.pidfd >= 0:
            with selectors.DefaultSelector() as selector:
                selector.register(self.pidfd, selectors.EVENT_READ)
                selector.select(10.0)
            os.close(self.pidfd)
            self.pidfd = -1
            return
        with suppress(ProcessLookupError):
            for _ in range(1000):
                os.kill(self.pid, 0)
                time.sleep(0.01)


class RankGroup:
    def __init__(
        self,
        fork_server: ForkServer,
        model: str,
        options: dict[str, Any],
        placements: list[DevicePlacement],
        *,
        tensor_parallel: int,
        backend: str,
        timeout: float,
        progress: Progress | None = None,
    ) -> None:
        self.timeout = timeout
        self._progress = progress
        self.capacity = 0  # tokens of an empty KV cache: the same on every rank
        self.ranks: list[RankHandle] = []
        self._finished_a_round = False
        self._listened = time.monotonic()
        self._store = make_store("127.0.0.1", 0, is_master=True)
        try:
            for rank, placement in enumerate(placements):
                orders = RankOrders(
                    model=model,
                    options=options,
                    rank=rank,
                    branch_parallel=len(placements) // tensor_parallel,
                    tensor_parallel=tensor_parallel,
                    placement=placement,
                    backend=backend,
                    port=self._store.port,
                    timeout=2 * timeout,  # of collectives: the supervisor is to notice first
                    heartbeat_seconds=timeout / 20,
                )
                self._fork(fork_server, orders)
            while not all(handle.ready for handle in self.ranks):
                self.receive(busy=True)
        except BaseException as error:
            if isinstance(error, LostRankError) and error.rank is None:
                error.rank = self.blame()
            self.close()
            raise

    def _fork(self, fork_server: ForkServer, orders: RankOrders) -> None:
        here, there = socket.socketpair()
        with there:
            try:
                pid = fork_server.fork(orders, there)
            except (EOFError, OSError):
                here.close()
                raise LostRankError(None, "the fork server is gone") from None
        self.ranks.append(RankHandle(orders.rank, pid, _pidfd(pid), Channel(here)))

    @property
    def pids(self) -> list[int]:
        return [handle.pid for handle in self.ranks]

    @property
    def alive(self) -> int:
        """Ranks that are up."""
        return sum(handle.ready and handle.is_alive for handle in self.ranks)

    def check_alive(self) -> None:
        for handle in self.ranks:
            if not handle.is_alive:
                raise LostRankError(handle.rank, "it is gone")

    def send(self, *command: Any) -> None:
        """The same to every rank. A rank that cannot be reached is found out by `receive`."""
        for handle in self.ranks:
            with suppress(OSError):
                handle.channel.send(*command)

    def receive(self, *, busy: bool, seconds: float | None = None) -> list[Message]:
        """Wait for a sign of life and return what is for the supervisor; LostRankError."""
        if not self.ranks:
            raise LostRankError(None, "it has ended")
        if time.monotonic() - self._listened > self.timeout / 4:
            self.forgive_silence()  # nobody listened: what is there counts as fresh
        self._listened = time.monotonic()
        found = []
        for handle in self._readable(self.timeout / 20 if seconds is None else seconds):
            try:
                messages = handle.channel.received()
            except (EOFError, OSError):
                raise LostRankError(handle.rank, "it is gone") from None
            handle.last_heard = time.monotonic()
            found += [m for m in messages if self.handle_message(handle, m)]
        self._find_silent(busy)
        return found

    def forgive_silence(self) -> None:
        for handle in self.ranks:
            handle.last_heard = time.monotonic()

    @property
    def silence(self) -> float:
        """Seconds since the rank that has been silent longest was heard."""
        now = time.monotonic()
        return max((now - handle.last_heard for handle in self.ranks), default=0.0)

    def blame(self) -> int | None:
        """The rank whose channel closes first, if one does; others report failed collectives."""
        until = time.monotonic() + _BLAME_SECONDS
        while self.ranks and (left := until - time.monotonic()) > 0:
            for handle in self._readable(left):
                try:
                    handle.channel.received()
                except (EOFError, OSError):
                    return handle.rank
        return None

    def close(self) -> None:
        for handle in self.ranks:
            handle.kill()
        for handle in self.ranks:
            handle.wait()
        self.ranks.clear()
        self._store = None

    def handle_message(self, handle: RankHandle, message: Message) -> bool:
        """Act on a message about the rank itself; True: it is for the supervisor."""
        kind, *rest = message
        if kind == "heartbeat":
            handle.phase, seconds = rest
            limit = self.timeout * (1.0 if self._finished_a_round else LOADING_FACTOR)
            limit *= WAITING_FACTOR if handle.phase == "waiting" else BUSY_FACTOR
            if handle.phase != "idle" and seconds > limit:
                reason = f"it has been at {handle.phase} for {seconds:.1f} s"
                raise LostRankError(handle.rank, reason)
        elif kind == "loading":
            if self._progress is not None:
                self._progress(*rest)
        elif kind == "ready":
            handle.ready, handle.phase = True, "idle"
            self.capacity = rest[0]
        elif kind == "error":  # of the request or the model: another group would fail likewise
            self.close()
            raise rest[0]
        elif kind == "failed":
            raise LostRankError(handle.rank, rest[0])
        elif kind == "lost":  # because of another rank
            raise LostRankError(None, rest[0])
        else:
            self._finished_a_round |= kind == "round"
            return True
        return False

    def _readable(self, seconds: float) -> Iterator[RankHandle]:
        with selectors.DefaultSelector() as selector:
            for handle in self.ranks:
                selector.register(handle.channel, selectors.EVENT_READ, handle)
            for key, _ in selector.select(seconds):
                yield key.data

    def _find_silent(self, busy: bool) -> None:
        now = time.monotonic()
        for handle in self.ranks:
            limit = BUSY_FACTOR * self.timeout * (1.0 if handle.ready else LOADING_FACTOR)
            silent = now - handle.last_heard
            if (busy or not handle.ready) and silent > limit:
                raise LostRankError(handle.rank, f"it has been silent for {silent:.1f} s")


def _pidfd(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return -1
