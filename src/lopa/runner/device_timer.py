"""CUDA events around forwards: how long each takes, and how long the device idles before it."""

from __future__ import annotations

from typing import NamedTuple

import torch


class ForwardTime(NamedTuple):
    """Seconds of one forward."""

    waited: float  # idle time of the device since the forward before: it waits for the host
    forward: float


class DeviceTimer:
    """Times forwards that follow one another.

    The events of a forward are read when the next one has been launched: reading them takes host
    time, and the device is busy then.
    """

    def __init__(self, in_flight: int = 1) -> None:
        """in_flight: most forwards at once, when one has been launched."""
        # [start, stop] of the last forwards, the latest last: those in flight, one that has ended,
        # and the one before it
        self._events = [[_event(), _event()] for _ in range(in_flight + 2)]
        self._forwards = 0
        self._time: ForwardTime | None = None
        self.total = ForwardTime(0.0, 0.0)  # of all that were read

    def start(self) -> None:
        """Just before a forward is launched."""
        self._forwards += 1
        self._events.append(self._events.pop(0))
        self._events[-1][0].record()

    def stop(self) -> None:
        """When all of it has been launched."""
        self._events[-1][1].record()
        if self._forwards >= len(self._events):
            (_, before), (start, stop), *_ = self._events
            self._time = ForwardTime(
                before.elapsed_time(start) / 1e3, start.elapsed_time(stop) / 1e3
            )
            self.total = ForwardTime(*(sum(x) for x in zip(self.total, self._time, strict=True)))

    def take(self) -> ForwardTime | None:
        """Of the last forward before those in flight; None if it was taken or there is none."""
        time, self._time = self._time, None
        return time


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
