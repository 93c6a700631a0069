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

    def __init__(self) -> None:
        # [start, stop] of the last three forwards, the latest last
        self._events = [[_event(), _event()] for _ in range(3)]
        self._forwards = 0
        self._time: ForwardTime | None = None

    def start(self) -> None:
        """Just before a forward is launched; the one before has ended."""
        self._forwards += 1
        self._events.append(self._events.pop(0))
        self._events[-1][0].record()

    def stop(self) -> None:
        """When all of it has been launched."""
        self._events[-1][1].record()
        if self._forwards > 2:
            (_, before), (start, stop), _ = self._events
            self._time = ForwardTime(
                before.elapsed_time(start) / 1e3, start.elapsed_time(stop) / 1e3
            )

    def take(self) -> ForwardTime | None:
        """Of the forward before the last one launched; None if it was taken or there is none."""
        time, self._time = self._time, None
        return time


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
