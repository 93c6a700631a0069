"""The round cost: what a round of so many tokens and sessions takes on some device."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lopa.atomic_write import write_lines
from lopa.errors import ConfigError
from lopa.types import FloatArray

USUAL_ROW = 64  # tokens of a row in the middle of an answer: two blocks of 32
_END = 1 << 24  # tokens: no round is as large


@dataclass(frozen=True)
class RoundCost:
    """Seconds by the tokens that a round forwards: straight lines between measured points.

    Before the first point it is flat, behind the last one the last line goes on. The points are
    of a round of one session, the host's part included; each further session adds `per_session`,
    the host's part of a session, in which the device waits.
    """

    points: tuple[tuple[int, float], ...]  # (tokens, seconds), tokens rising
    per_session: float = 0.0
    # Rounds are padded: up to so many tokens to a multiple of so many; no further than the last.
    padding: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        tokens = [t for t, _ in self.points]
        if (
            not tokens
            or tokens != sorted(set(tokens))
            or min(tokens) < 1
            or not all(0 < s < float("inf") for _, s in self.points)
        ):
            raise ConfigError("a round's cost is (tokens, seconds) points: tokens rising, above 0")
        if not 0 <= self.per_session < float("inf"):
            raise ConfigError(f"a session's cost is at least 0: got {self.per_session}")

    def __call__(self, tokens: int, sessions: int = 1) -> float:
        return float(self.of_rounds(np.array([float(tokens)]), sessions)[0])

    def of_rounds(self, tokens: FloatArray, sessions: int) -> FloatArray:
        """Of rounds of so many tokens each."""
        found: FloatArray = np.interp(tokens, *self._line)
        return found + (sessions - 1) * self.per_session

    def halves_pay(self, tokens: int, sessions: int) -> bool:
        """Whether two rounds of half the sessions take less time than one of all, if the host has
        one half while the device has the other.

        Where the host takes longer than the device it never waits for it, and nothing is saved.
        """
        host = sessions * self.per_session
        whole, half = (self(n) - self.per_session for n in (tokens, -(-tokens // 2)))  # device
        return host < whole and max(2 * half, half + host / 2) < whole + host

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
            "per_session": self.per_session,
            "padding": [list(step) for step in self.padding],
        }

    @classmethod
    def of(cls, given: RoundCostLike) -> RoundCost:
        """Of points, or of what `settings` gave."""
        if isinstance(given, RoundCost):
            return given
        try:
            raw: Mapping[str, Any] = given if isinstance(given, Mapping) else {"points": given}
            points = tuple((int(t), float(s)) for t, s in raw["points"])
            per_session = float(raw.get("per_session", 0.0))
            padding = tuple((int(upto), int(step)) for upto, step in raw.get("padding", ()))
        except (KeyError, TypeError, ValueError):
            raise ConfigError(
                "a round's cost is a list of (tokens, seconds) points, or an object with `points`"
            ) from None
        return cls(points, per_session, padding)

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
