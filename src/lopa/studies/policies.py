"""Lookahead policies for studies: a choice left to chance, or the usual ones, observed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import numpy as np

from lopa.config import DecodeConfig, ScoreName
from lopa.decoding import lookahead
from lopa.decoding.lookahead import Selection
from lopa.decoding.outcome import Outcome
from lopa.decoding.policy import ScoredPolicy
from lopa.decoding.round_view import Anchor, RoundView
from lopa.types import Draft


class StudyPolicy(ScoredPolicy):
    """Chance comes from `seed`: the same seed gives the same choices."""

    def __init__(self, config: DecodeConfig, seed: int = 0) -> None:
        super().__init__(config)
        self.rng = np.random.default_rng(seed)


class RandomPositions(StudyPolicy):
    """Looks ahead at random masks, not at those ranked first."""

    def spawn(self, anchor: Anchor) -> list[Draft]:
        ranking = self.rng.random(len(anchor.free))
        return lookahead.spawn(anchor, ranking, self.config)


class LeastConfident(StudyPolicy):
    """Looks ahead at the masks ranked last."""

    def spawn(self, anchor: Anchor) -> list[Draft]:
        ranking = -anchor.view.ranking[anchor.row]
        return lookahead.spawn(anchor, ranking, self.config)


class RandomWinner(StudyPolicy):
    """Takes any branch, not the best-scored."""

    def select(self, view: RoundView, drafts: list[Draft]) -> Selection:
        scores = super().select(view, drafts).scores
        return Selection(int(self.rng.integers(len(scores))), scores)


class RandomOrder(RandomPositions):
    """Places the token of a random mask in every round, then fills what passes."""

    def select(self, view: RoundView, drafts: list[Draft]) -> Selection:
        return Selection(0, super().select(view, drafts).scores)


class Observed(StudyPolicy):
    """Notes, for every round, all branches' scores by each definition, and what each brings."""

    def __init__(self, config: DecodeConfig, seed: int = 0) -> None:
        super().__init__(config, seed)
        names: tuple[ScoreName, ...] = get_args(ScoreName)
        self._configs = {name: _scored_by(config, name) for name in names}
        self.notes: dict[str, Any] = {"scores": [], "brought": [], "winners": [], "placed": []}

    def observe(self, outcome: Outcome) -> None:
        view, drafts = outcome.view, outcome.drafts
        placed = [*(draft[0].max_prob for draft in drafts), None]
        found: dict[str, list[float]] = {
            name: lookahead.score(view, drafts, config).tolist()
            for name, config in self._configs.items()
        }
        self.notes["scores"].append(found)
        self.notes["brought"].append(outcome.brought(list(range(len(placed)))))
        self.notes["winners"].append(outcome.winner)
        self.notes["placed"].append(placed[outcome.winner])


def _scored_by(config: DecodeConfig, name: ScoreName) -> DecodeConfig:
    own: Any = None  # a score's own options take its defaults
    return replace(config, score=name, score_window=own, score_fraction=own, creation_weight=own)


POLICIES: dict[str, type[StudyPolicy]] = {
    "random positions": RandomPositions,
    "least confident positions": LeastConfident,
    "random winner": RandomWinner,
    "random order": RandomOrder,
    "observed": Observed,
}
