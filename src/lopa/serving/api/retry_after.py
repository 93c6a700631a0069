"""How long a client that is refused should wait: the `Retry-After` of a 429 or a 503."""

from __future__ import annotations

import math
import time
from collections import deque

from lopa.serving.jobs import Finished

_RECENT = 64  # sequences whose durations make the estimate
_MAX_SECONDS = 600


class RetryAfter:
    """Estimates from how long recent sequences ran and how long the engine took to start."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._start_seconds: float | None = None  # of the last start that succeeded
        self._started_at = time.monotonic()  # the start that is under way
        self._drained_at = 0.0

    def record(self, finished: Finished) -> None:
        self._recent.append(finished.engine_seconds - finished.queue_seconds)

    def starting(self, delay: float = 0.0) -> None:
        """An engine starts, or will after `delay` seconds."""
        self._started_at = time.monotonic() + delay

    def started(self) -> None:
        self._start_seconds = time.monotonic() - self._started_at

    def draining(self, seconds: float) -> None:
        self._drained_at = time.monotonic() + seconds

    def for_capacity(self, excess: int, at_once: int, started: bool) -> int:
        """Until `excess` sequences of those that run `at_once` have ended."""
        mean = sum(self._recent) / len(self._recent) if self._recent else 0.0
        return _whole(mean * excess / at_once + (0.0 if started else self._left_of_start()))

    def for_start(self) -> int:
        return _whole(self._left_of_start())

    def for_shutdown(self) -> int:
        """Until those that run have ended, and as long again as this server took to start."""
        left = max(0.0, self._drained_at - time.monotonic())
        return _whole(left + (self._start_seconds or 0.0))

    def _left_of_start(self) -> float:
        elapsed = time.monotonic() - self._started_at
        if self._start_seconds is None or elapsed > self._start_seconds:
            return abs(elapsed)  # nothing is known: as long as it has taken so far
        return self._start_seconds - elapsed


def _whole(seconds: float) -> int:
    return max(1, min(_MAX_SECONDS, math.ceil(seconds)))
