"""Random choices that are the same in every process and Python version.

Only `random.Random(str)` seeding and `.random()` are used, because both are documented to be
reproducible; the higher-level methods of `random` may change between versions.
"""

import hashlib
import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

EVALUATION_SHARE = 8
"""One content in this many belongs to the evaluation splits and is never used for training."""

HELD_OUT_PERCENT = 15


class Rng:
    """A stream of random choices fixed by its key."""

    __slots__ = ("random",)

    def __init__(self, key: str) -> None:
        self.random = random.Random(key).random

    def chance(self, probability: float) -> bool:
        """True with the given probability."""
        return self.random() < probability

    def between(self, low: int, high: int) -> int:
        """A whole number from low to high, both included."""
        return low + int(self.random() * (high - low + 1))

    def pick(self, options: Sequence[T]) -> T:
        """One option, all equally likely."""
        return options[int(self.random() * len(options))]

    def skewed(self, options: Sequence[T]) -> T:
        """One option, earlier ones likelier: four options come up as 7 : 5 : 3 : 1."""
        return options[int(len(options) * (1.0 - self.random() ** 0.5))]

    def leaning(self, options: Sequence[T]) -> T:
        """One option, mostly the first: two options come up as 15 : 1, three as 65 : 15 : 1."""
        return options[int(len(options) * (1.0 - self.random() ** 0.25))]


def digest(text: str) -> int:
    """A stable 64-bit hash of text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def in_evaluation_bucket(content: str) -> bool:
    """Whether a problem with this content is kept out of training."""
    return digest("content:" + content) % EVALUATION_SHARE == 0


def is_held_out(structure: str) -> bool:
    """Whether a structure is reserved, by its name alone, for the held-out split."""
    return digest("structure:" + structure) % 100 < HELD_OUT_PERCENT


def accepts(split: str, structure: str, content: str) -> bool:
    """Whether a picked content may be used in a split; callers pick again when it may not."""
    if split == "held-out":
        return is_held_out(structure)
    if is_held_out(structure):
        return False
    return in_evaluation_bucket(content) == (split == "eval")
