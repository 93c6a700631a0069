"""AUP, accuracy under parallelism: one number for a curve of accuracy against tokens per forward.

The area under the curve, in which accuracy that is lost weighs more the more of it is lost. Higher
is better; it knows nothing of hardware.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

DROP = 5.0  # points of accuracy under the first beyond which a point does not count
STEEPNESS = 3.0


def aup(points: Sequence[tuple[float, float]], best: float | None = None) -> float:
    """points: (tokens per forward, accuracy in percent); best: the accuracy to be measured by.

    `best` is the highest among the points unless it is given, as it must be to compare curves.
    """
    if not points:
        return 0.0
    ordered = sorted(points)
    least = ordered[0][1] - DROP
    kept = [(tpf, accuracy) for tpf, accuracy in ordered if accuracy >= least]
    top = max(accuracy for _, accuracy in kept) if best is None else best

    area = kept[0][0] * kept[0][1]
    for (tpf, accuracy), (before, earlier) in zip(kept[1:], kept, strict=False):
        area += (tpf - before) * (weighed(accuracy, top) + weighed(earlier, top)) / 2
    return area


def weighed(accuracy: float, best: float) -> float:
    """An accuracy, less for what it lacks to the best than that alone."""
    return accuracy * min(math.exp(-STEEPNESS * (1 - accuracy / best)), 1.0) if best else 0.0
