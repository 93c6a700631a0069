"""A clock of the device's own: how long forwards take, and how long it waits in between."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Lap(NamedTuple):
    """Seconds of one forward."""

    waited: float  # from the end of the one before to its beginning: for the host
    forward: float


class Clock:
    """Of forwards that follow one another.

    A lap is read when the forward behind it has begun: that takes the host's time, and nobody waits
    for it then.
    """

    def __init__(self) -> None:
        # [began, ended] of the last three forwards, the latest at the end
        self._marks = [[_mark(), _mark()] for _ in range(3)]
        self._begun = 0
        self._lap: Lap | None = None

    def begin(self) -> None:
        """Just before a forward is started; the one before has ended."""
        self._begun += 1
        self._marks.append(self._marks.pop(0))
        self._marks[-1][0].record()

    def end(self) -> None:
        """When all of it has been started."""
        self._marks[-1][1].record()
        if self._begun > 2:
            (_, last), (began, ended), _ = self._marks
            self._lap = Lap(last.elapsed_time(began) / 1e3, began.elapsed_time(ended) / 1e3)

    def take(self) -> Lap | None:
        """Of the forward before the one that was begun last; None: there is none, or no more."""
        lap, self._lap = self._lap, None
        return lap


def _mark() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
