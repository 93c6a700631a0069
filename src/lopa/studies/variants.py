"""Decoders for studies: LoPA with a choice left to chance, and LoPA that observes itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import numpy as np

from lopa.config import DecodeConfig, ScoreName
from lopa.decoding import lookahead
from lopa.decoding.decoder import Decoder
from lopa.types import FloatArray, Round


class Variant(Decoder):
    """`seed` is for those that throw dice: the same seed throws the same again."""

    def __init__(self, *arguments: Any, seed: int = 0, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.dice = np.random.default_rng(seed)


class RandomPositions(Variant):
    """Looks ahead at random masks, not at those ranked first."""

    def _ranked(self, ranking: FloatArray) -> FloatArray:
        return self.dice.random(len(ranking))


class LeastConfident(Variant):
    """Looks ahead at the masks ranked last."""

    def _ranked(self, ranking: FloatArray) -> FloatArray:
        return -ranking


class RandomWinner(Variant):
    """Takes any branch, not the best-scored."""

    def _select(self, scores: lookahead.Scores) -> int:
        return int(self.dice.integers(len(scores)))


class RandomOrder(RandomPositions):
    """Places the token of a random mask in every round, then fills what passes the threshold."""

    def _select(self, scores: lookahead.Scores) -> int:
        return 0  # the lookahead, where there is one


class Observed(Variant):
    """Notes, for every round, all branches' scores by each definition, and what each brings."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        names: tuple[ScoreName, ...] = get_args(ScoreName)
        self._configs = {name: _scored_by(self.config, name) for name in names}
        self.notes: dict[str, Any] = {"scores": [], "brought": [], "winners": [], "placed": []}

    def record(self) -> Round:
        chosen, size = self._chosen, self.window.size
        assert chosen is not None
        found: dict[str, list[float]] = {
            name: lookahead.score(chosen.seen, chosen.ahead, size, config).tolist()
            for name, config in self._configs.items()
        }
        placed = [*(ahead.max_prob for ahead in chosen.ahead), None]
        self.notes["scores"].append(found)
        self.notes["brought"].append(self._brought(list(range(len(placed))), chosen))
        self.notes["winners"].append(chosen.winner)
        self.notes["placed"].append(placed[chosen.winner])
        return super().record()


def _scored_by(config: DecodeConfig, name: ScoreName) -> DecodeConfig:
    neutral: Any = None  # a score's own options are settled anew
    return replace(
        config, score=name, score_window=neutral, score_fraction=neutral, creation_weight=neutral
    )


VARIANTS: dict[str, type[Variant]] = {
    "random positions": RandomPositions,
    "least confident positions": LeastConfident,
    "random winner": RandomWinner,
    "random order": RandomOrder,
    "observed": Observed,
}
