"""What the engines of one model share, so that one thread at a time touches its runner or ranks."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from lopa.errors import LopaError

T = TypeVar("T")


class EngineLock:
    """Taken for a round, or over all rounds of a call; refused in a forked child.

    An abort waits for nobody. It may come from a generator that is garbage-collected: in any
    thread, and in the midst of a round too. It is done then before the next round.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._process = os.getpid()
        self._in_round = False
        self._deferred: deque[Callable[[], None]] = deque()

    def __reduce__(self) -> tuple[type[EngineLock], tuple[()]]:
        return EngineLock, ()  # a copy of a model has its own

    @property
    def is_forked(self) -> bool:
        return os.getpid() != self._process

    def check_process(self) -> None:
        """Threads do not survive a fork: torch would wait for its own for ever."""
        if self.is_forked:
            raise LopaError(
                "this model was loaded before the process was forked: load it in the child, "
                'or start the child with multiprocessing\'s "spawn" method'
            )

    def held(self) -> AbstractContextManager[Any]:
        """For a `with` over a whole call; other threads wait.

        The lock itself: a `__enter__` in Python could be interrupted with the lock taken.
        """
        self.check_process()
        return self._lock

    def run(self, action: Callable[[], T]) -> T:
        """Do a round, or what may not come in the midst of one."""
        with self.held():
            if self._in_round:
                raise LopaError(
                    "a round is under way: decode outside of callbacks and signal handlers"
                )
            self._run_deferred()
            self._in_round = True
            try:
                return action()
            finally:
                self._in_round = False

    def run_between_rounds(self, action: Callable[[], None]) -> None:
        """Do it at once if no round is under way, else before the next one."""
        if self.is_forked:
            return  # the sessions are the parent's
        self._deferred.append(action)
        if self._lock.acquire(blocking=False):
            try:
                if not self._in_round:
                    self._run_deferred()
            finally:
                self._lock.release()

    def _run_deferred(self) -> None:
        self._in_round = True  # one that comes meanwhile is next
        try:
            while self._deferred:
                self._deferred.popleft()()
        finally:
            self._in_round = False
