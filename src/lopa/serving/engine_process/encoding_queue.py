"""Jobs that wait to be encoded: a short prompt never waits for a long one.

Three threads: for short prompts, for long ones, and for those with a schema or a regex to compile.
Each takes them in the order of length. The library encodes a long text without the GIL, so that
neither the short ones nor rounds wait for it.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from lopa.serving.jobs import PATTERNS, Job, prompt_characters

SHORT = 10_000  # characters, or tokens: some milliseconds
_NICENESS = 10  # of the other threads, which would take a processor from rounds


class EncodingQueue:
    """Calls `encode`, which must not raise, with each job. Its threads end with the process."""

    def __init__(self, encode: Callable[[Job], None]) -> None:
        self._encode = encode
        self._numbers = itertools.count()
        self._short, self._long, self._patterns = _Lane(), _Lane(), _Lane()
        names = {"short prompts": self._short, "long prompts": self._long}
        for name, lane in {**names, "patterns": self._patterns}.items():
            threading.Thread(target=self._run, args=(lane,), name=name, daemon=True).start()

    def put(self, job: Job) -> None:
        length = _length(job.prompt) + len(job.suffix or "")
        lane = self._short if length <= SHORT else self._long
        if any(job.options.get(name) is not None for name in PATTERNS):
            lane = self._patterns
        with lane.changed:
            heapq.heappush(lane.waiting, (length, next(self._numbers), job))
            lane.changed.notify()

    def _run(self, lane: _Lane) -> None:
        if lane is not self._short and sys.platform == "linux":  # where it is a thread's own
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        while True:
            with lane.changed:
                lane.changed.wait_for(lambda: lane.waiting)
                _, _, job = heapq.heappop(lane.waiting)
            self._encode(job)


class _Lane:
    def __init__(self) -> None:
        self.waiting: list[tuple[int, int, Job]] = []  # a heap: length, number, job
        self.changed = threading.Condition()


def _length(prompt: Any) -> int:
    characters = prompt_characters(prompt)
    return len(prompt) if characters is None else characters
