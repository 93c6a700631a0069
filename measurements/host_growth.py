"""How much more a session takes the host with branches, from the time of rounds of answers.

    python measurements/host_growth.py [FILE …]

Each file is one that `measurements/load_time.py --json` wrote. A session's part of a round is a
share of what every round takes, its own part by its branches, and what the tokens take that the
round brings. The last is the same for each token however many a round brings, so it does not grow
with branches here: a session without them has it, too, and growth is over both. Rounds that bring
many tokens take longer than that by what those take. Records have no such part. The speed of the
machine is another one for each task and number of requests at once. Prints HOST_GROWTH and
RECORDS_GROWTH of engine/cost_measurement.py; less than 1 counts as 1.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from lopa.config import AUTO_BRANCHES
from lopa.decoding.round_cost import RoundCost
from lopa.engine.base import TOKEN_BUDGET
from lopa.types import FloatArray

FILES = [Path(__file__).parent / "h200" / f"load_time_{seed}.json" for seed in (31, 231)]
ITERATIONS = 200  # of the coefficients and the speeds in turn


def figures(files: list[Path]) -> list[dict[str, Any]]:
    """Those of fixed numbers, each with the `group` that was timed together."""
    found = []
    for file in files:
        for one in json.loads(file.read_text(encoding="utf-8"))["figures"]:
            if one["k"] != "auto":
                found.append({**one, "group": (file.name, one["task"], one["at once"])})
    return found


def terms(one: dict[str, Any]) -> list[float]:
    """[8] of every round, of one where sessions differ, by AUTO_BRANCHES, of a token."""
    tokens = one["at once"] * one["row"] * (1 + one["branches"])
    together = one["at once"] / max(1.0, tokens / TOKEN_BUDGET)  # sessions of a round
    own = np.interp(one["branches"], AUTO_BRANCHES, np.arange(len(AUTO_BRANCHES)))
    hats = np.maximum(0.0, 1.0 - abs(own - np.arange(len(AUTO_BRANCHES))))
    mixed = RoundCost.share_mixed(together) if together > 1 else 0.0
    return [1 / together, mixed / together, *hats.tolist(), one["TPF"]]


def fit(found: list[dict[str, Any]], part: str) -> FloatArray:
    """[8] microseconds of each of the terms, at the mean speed; by relative errors."""
    micros = np.array([one[part] for one in found])
    names = sorted({one["group"] for one in found})
    group = np.array([names.index(one["group"]) for one in found])
    each = np.array([terms(one) for one in found])
    if part == "records":
        each[:, -1] = 0.0
    speed = np.ones(len(names))
    taken: FloatArray
    for _ in range(ITERATIONS):
        expected = each * speed[group, None] / micros[:, None]
        taken, *_ = np.linalg.lstsq(expected, np.ones(len(found)), rcond=None)
        error = np.log(micros / (each @ taken))
        speed = np.exp(np.bincount(group, error) / np.bincount(group))
        speed /= np.exp(np.log(speed).mean())
    error -= np.log(speed)[group]
    print(f"  root mean square of relative errors {np.sqrt((error**2).mean()):.3f}")
    return taken


def main() -> None:
    found = figures([Path(name) for name in sys.argv[1:]] or FILES)
    plain = np.mean([one["TPF"] for one in found if one["k"] == "0"])
    for part in ("host", "records"):
        print(part)
        (every, mixed), own, (token,) = np.split(fit(found, part), [2, -1])
        growth = 1 + (own - own[0]) / (own[0] + token * plain)
        print(f"  every round {every:.0f} µs, where sessions differ {mixed:.0f} µs more")
        each = ", ".join(f"{of:.0f}" for of in own)
        print(f"  of a session {each} µs, of a token {token:.1f} µs")
        print(f"  growth {', '.join(f'{of:.2f}' for of in growth)}")


if __name__ == "__main__":
    main()
