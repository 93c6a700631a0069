"""LoPA with one of its choices made by chance instead, which shows what the choice is worth."""

from __future__ import annotations

from typing import Any

import numpy as np

from lopa.decoding import lookahead
from lopa.decoding.decoder import Decoder
from lopa.sequence import BoolArray, FloatArray, IntArray, Lookahead


class Chance(Decoder):
    """A decoder with dice of its own: the same seed throws the same again."""

    def __init__(self, *arguments: Any, seed: int = 0, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.dice = np.random.default_rng(seed)


class RandomPositions(Chance):
    """Looks ahead at masks drawn by lot, not at the best-ranked."""

    def _spawn(
        self,
        left: BoolArray,
        token: IntArray,
        max_prob: FloatArray,
        ranking: FloatArray,
        offset: int,
    ) -> list[Lookahead]:
        lots = self.dice.random(len(ranking))
        return lookahead.spawn(left, token, max_prob, lots, offset, self.config)


class RandomWinner(Chance):
    """Takes any branch, not the best-scored."""

    def _select(self, scores: lookahead.Scores) -> int:
        return int(self.dice.integers(len(scores)))


class RandomOrder(RandomPositions):
    """Places the token of a mask drawn by lot in every round, then fills what passes."""

    def _select(self, scores: lookahead.Scores) -> int:
        return 0  # the lookahead, where there is one
