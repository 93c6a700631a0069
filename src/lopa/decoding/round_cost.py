"""The round cost: what a round of so many tokens and sessions takes on some device."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lopa.atomic_write import write_lines
from lopa.config import AUTO_BRANCHES
from lopa.errors import ConfigError
from lopa.types import FloatArray

USUAL_ROW = 64  # tokens of a row in the middle of an answer: two blocks of 32
_END = 1 << 24  # tokens: no round is as large
_MOST_KEPT = 4096  # rounds of one session
_MOVES = 0.25  # of rounds, in which the window of a session moves
_NOTHING = (0.0,) * len(AUTO_BRANCHES)


class HostPart(NamedTuple):
    """Seconds that sessions take the host in a round; of several rounds, arrays."""

    waited: Any  # between two forwards: the device waits
    records: Any  # while the device works


NO_HOST = HostPart(0.0, 0.0)


@dataclass(frozen=True)
class RoundCost:
    """What a round takes: the device's part by tokens, the host's part by sessions and branches.

    The device's part is straight lines between measured points: before the first it is flat, behind
    the last one the last line goes on. A session costs the host the more the more branches it has,
    and so do its records. Those are made while the device works: they count where they take longer
    than that.
    """

    points: tuple[tuple[int, float], ...]  # (tokens, seconds), tokens rising
    # Of a session by its branches, as AUTO_BRANCHES counts them; none: it costs nothing
    host: tuple[float, ...] = ()  # between two forwards
    records: tuple[float, ...] = ()  # while the device works
    # Rounds are padded: up to so many tokens to a multiple of so many; no further than the last.
    padding: tuple[tuple[int, int], ...] = ()
    # Sessions may go in two halves, one on the host while the other is on the device.
    in_halves: bool = False
    every_round: float = 0.0  # host's part of a round of however many sessions
    # What is added to that where sessions differ: nearly each round the window of one of them moves
    mixed_round: float = 0.0

    def __post_init__(self) -> None:
        tokens = [t for t, _ in self.points]
        if (
            not tokens
            or tokens != sorted(set(tokens))
            or min(tokens) < 1
            or not all(0 < s < float("inf") for _, s in self.points)
        ):
            raise ConfigError("a round's cost is (tokens, seconds) points: tokens rising, above 0")
        for part in (self.host, self.records):
            if len(part) not in (0, len(AUTO_BRANCHES)):
                raise ConfigError(
                    "the host's part of a session has a number for each of "
                    f"{AUTO_BRANCHES} branches: got {len(part)}"
                )
        for seconds in (*self.host, *self.records, self.every_round, self.mixed_round):
            if not 0 <= seconds < float("inf"):
                raise ConfigError(f"the host's part of a round is at least 0: got {seconds}")

    def __call__(self, tokens: int, branches: Sequence[int] = (0,)) -> float:
        """branches: of each session of the round."""
        return self.of_round(tokens, self.host_of_all(branches), len(branches))

    def of_one(self, tokens: int, branches: int) -> float:
        """Of a round of one session, kept: it is asked for every round, and sizes are few."""
        kept = self._of_one
        found = kept.get((tokens, branches))
        if found is None:
            if len(kept) >= _MOST_KEPT:
                kept.clear()
            found = kept[tokens, branches] = self(tokens, (branches,))
        return found

    def of_round(self, tokens: float, host: HostPart, sessions: int) -> float:
        """`of_rounds` of one round, without arrays: several times as fast."""
        whole = self._of_whole(tokens, host, sessions)
        if not self.in_halves:
            return whole
        halves = self._of_halves(tokens, host, sessions)
        return whole if halves is None else min(whole, halves)

    def host_of_all(self, branches: Sequence[int]) -> HostPart:
        """Of sessions with so many branches each."""
        try:
            parts = list(map(self.host_by_number.__getitem__, branches))
        except IndexError:  # more than auto takes
            return self.host_of_all([min(k, AUTO_BRANCHES[-1]) for k in branches])
        return HostPart(sum([part.waited for part in parts]), sum([part.records for part in parts]))

    def host_of(self, branches: float) -> HostPart:
        """Of a session; the number may be a mean of rounds."""
        below = min(int(branches), AUTO_BRANCHES[-1])
        part, above = branches - below, min(below + 1, AUTO_BRANCHES[-1])
        each = zip(self.host_by_number[below], self.host_by_number[above], strict=True)
        return HostPart(*(low + part * (high - low) for low, high in each))

    def host_share(self, tokens: float, branches: Sequence[int]) -> float:
        """The sessions' part of a round over the rest. branches: of each session."""
        host: float = sum(self.host_of_all(branches))
        return host / (self.every_round_of(len(branches)) + self._device_of(tokens))

    def slope(self, anchors: int) -> float:
        """Seconds that a token adds to a round, from anchors of about so many up to all branches.

        It is the same for numbers between two powers of two: what is made of it can be kept.
        """
        size = anchors.bit_length()
        found = self._slopes.get(size)
        if found is None:
            least, most = 1 << (size - 1), AUTO_BRANCHES[-1] + 1 << (size - 1)
            rise = self._device_of(most) - self._device_of(least)
            found = self._slopes[size] = rise / (most - least)
        return found

    def every_round_of(self, sessions: int) -> float:
        """The host's part of a round by itself."""
        if sessions < 2:
            return self.every_round
        return self.every_round + self.mixed_round * self.share_mixed(sessions)

    @staticmethod
    def share_mixed(sessions: int) -> float:
        """Of rounds in which the window of any session but one moves."""
        return 1.0 - (1.0 - _MOVES) ** (sessions - 1)

    def of_rounds(self, tokens: FloatArray, host: HostPart, sessions: int) -> FloatArray:
        """Of rounds of so many tokens, in which the sessions cost the host so much."""
        device = self._device(tokens)
        whole: FloatArray = np.maximum(device, host.records)
        whole += host.waited + self.every_round_of(sessions)
        if not self.in_halves or sessions < 2:
            return whole
        on_host = host.records + host.waited + 2 * self.every_round_of(sessions // 2)
        twice = np.maximum(2 * self._device(np.ceil(tokens / 2)), on_host)
        pays = on_host < device
        return np.where(pays, np.minimum(whole, twice), whole) if pays.any() else whole

    def halves_pay(self, tokens: int, branches: float, sessions: int) -> bool:
        """Whether two rounds of half the sessions take less time than one of all.

        branches: of a session.
        """
        host = HostPart(*(sessions * part for part in self.host_of(branches)))
        halves = self._of_halves(tokens, host, sessions)
        return halves is not None and halves < self._of_whole(tokens, host, sessions)

    def _of_whole(self, tokens: float, host: HostPart, sessions: int) -> float:
        """Of all sessions in one round."""
        on_host: float = host.waited + self.every_round_of(sessions)
        working: float = max(self._device_of(tokens), host.records)
        return working + on_host

    def _of_halves(self, tokens: float, host: HostPart, sessions: int) -> float | None:
        """Of two rounds of half of the sessions each; None: there are none, or they save nothing.

        The host has one half while the device has the other. Where the host takes longer than the
        device it never waits for it.
        """
        if not self.in_halves or sessions < 2:
            return None
        on_host: float = host.records + host.waited + 2 * self.every_round_of(sessions // 2)
        if on_host >= self._device_of(tokens):
            return None
        return max(2 * self._device_of(-(-tokens // 2)), on_host)

    def _device(self, tokens: FloatArray) -> FloatArray:
        found: FloatArray = np.interp(tokens, *self._line)
        return found

    def _device_of(self, tokens: float) -> float:
        at, seconds = self._lists
        if tokens > at[-1]:
            return seconds[-1]
        right = bisect_left(at, tokens)
        if right == 0:
            return seconds[0]
        (x0, x1), (y0, y1) = at[right - 1 : right + 1], seconds[right - 1 : right + 1]
        return y1 if tokens == x1 else y0 + (y1 - y0) * (tokens - x0) / (x1 - x0)

    @cached_property
    def _of_one(self) -> dict[tuple[int, int], float]:
        return {}

    @cached_property
    def _slopes(self) -> dict[int, float]:
        return {}

    @cached_property
    def _lists(self) -> tuple[list[float], list[float]]:
        return self._line.tokens.tolist(), self._line.seconds.tolist()

    @cached_property
    def host_by_number(self) -> list[HostPart]:
        """The host's part of a session by its branches, up to the most that auto takes."""
        numbers = np.arange(AUTO_BRANCHES[-1] + 1)
        parts = [
            np.interp(numbers, AUTO_BRANCHES, of or _NOTHING) for of in (self.host, self.records)
        ]
        return [HostPart(*each) for each in zip(*(part.tolist() for part in parts), strict=True)]

    @cached_property
    def _line(self) -> _Line:
        """Through the points, with a step up behind every padded size."""
        line = _through(self.points)
        sizes: list[int] = []
        start = 0
        for upto, step in self.padding:
            sizes += range(start + step, upto + 1, step)
            start = upto
        if not sizes:
            return line
        seconds = np.interp(sizes, *line)
        at = np.array([[before + 1, size] for before, size in pairwise([0, *sizes])]).reshape(-1)
        behind = np.interp(_END, *line)
        return _Line(np.append(at, _END), np.append(seconds.repeat(2), behind))

    # -- on file ------------------------------------------------------------------------------

    def settings(self) -> dict[str, Any]:
        """What makes it again; JSON."""
        return {
            "points": [list(point) for point in self.points],
            "host": list(self.host),
            "records": list(self.records),
            "every_round": self.every_round,
            "mixed_round": self.mixed_round,
            "padding": [list(step) for step in self.padding],
            "in_halves": self.in_halves,
        }

    @classmethod
    def of(cls, given: RoundCostLike) -> RoundCost:
        """Of points, or of what `settings` gave."""
        if isinstance(given, RoundCost):
            return given
        try:
            raw: Mapping[str, Any] = given if isinstance(given, Mapping) else {"points": given}
            points = tuple((int(t), float(s)) for t, s in raw["points"])
            host = tuple(float(seconds) for seconds in raw.get("host", ()))
            records = tuple(float(seconds) for seconds in raw.get("records", ()))
            every_round = float(raw.get("every_round", 0.0))
            mixed_round = float(raw.get("mixed_round", 0.0))
            padding = tuple((int(upto), int(step)) for upto, step in raw.get("padding", ()))
            in_halves = bool(raw.get("in_halves", False))
        except (KeyError, TypeError, ValueError):
            raise ConfigError(
                "a round's cost is a list of (tokens, seconds) points, or what `lopa bench cost "
                "--out FILE` writes: measure it anew if an earlier version wrote it"
            ) from None
        return cls(points, host, records, padding, in_halves, every_round, mixed_round)

    @classmethod
    def read(cls, path: Path) -> RoundCost:
        try:
            return cls.of(json.loads(path.read_text(encoding="utf-8")))
        except OSError as error:
            raise ConfigError(f"cannot read {path} ({error.strerror})") from None
        except (ValueError, ConfigError) as error:
            raise ConfigError(f"{path} holds no round cost ({error})") from None

    def write(self, path: Path, **about: Any) -> None:
        """about: of what device and model it is."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_lines(path, [json.dumps({**about, **self.settings()}, indent=1)])


RoundCostLike = RoundCost | Mapping[str, Any] | Sequence[Sequence[float]]

EVERY_ROUND_THE_SAME = RoundCost(((1, 1.0),))  # for counting forwards


class _Line(NamedTuple):
    tokens: Any  # rising, for np.interp
    seconds: Any


def _through(points: tuple[tuple[int, float], ...]) -> _Line:
    tokens, seconds = zip(*points, strict=True)
    slope = 0.0
    if len(points) > 1:
        slope = max(0.0, (seconds[-1] - seconds[-2]) / (tokens[-1] - tokens[-2]))
    beyond = seconds[-1] + slope * (_END - tokens[-1])
    return _Line(np.array([*tokens, _END]), np.array([*seconds, beyond]))
