"""How OpenMP's threads wait for each other: briefly spinning, then asleep.

By default they spin for milliseconds, which on a busy machine keeps the very thread from running
that they wait for: rounds then take several times as long (measurements/thread_waits.py).
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

# GNU's runtime, which torch's own packages have: some microseconds; LLVM's and Intel's: none.
_BRIEF = {"GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "0"}


def wait_briefly(environment: MutableMapping[str, str] = os.environ) -> None:
    """Unless the user says how threads wait. Has an effect before torch is imported only."""
    if "OMP_WAIT_POLICY" in environment:
        return
    for name, value in _BRIEF.items():
        environment.setdefault(name, value)
