"""The lookahead policy: which drafts a round tries, and which branch wins.

These two choices make lookahead; everything else is the decoder's. How many of the drafts are tried
with `branches="auto"` is its budget's.
"""

from __future__ import annotations

from typing import Protocol

from lopa.config import DecodeConfig
from lopa.decoding import exact_drafts, lookahead
from lopa.decoding.lookahead import Selection
from lopa.decoding.outcome import Outcome
from lopa.decoding.round_view import Anchor, RoundView
from lopa.types import Draft


class LookaheadPolicy(Protocol):
    """One per sequence. Every rank runs its own, so chance comes from a seed."""

    def spawn(self, anchor: Anchor) -> list[Draft]:
        """Drafts for the next round, the best first, one branch each; of more than `most` the rest
        is left out."""

    def select(self, view: RoundView, drafts: list[Draft]) -> Selection:
        """The winner. drafts: at least one; of all rows but the last, the anchor."""

    def observe(self, outcome: Outcome) -> None:
        """A round is over, and the next one has been launched."""


class ScoredPolicy:
    """`accept="score"`: drafts on the best-ranked masks, and the branch with the best score."""

    def __init__(self, config: DecodeConfig) -> None:
        self.config = config

    def spawn(self, anchor: Anchor) -> list[Draft]:
        return lookahead.spawn(anchor, None, self.config)

    def select(self, view: RoundView, drafts: list[Draft]) -> Selection:
        return lookahead.select(lookahead.score(view, drafts, self.config))

    def observe(self, outcome: Outcome) -> None:
        """It has nothing to learn."""


class AgreedPolicy(ScoredPolicy):
    """`accept="agreed"`: the best score of the branches whose token the anchor still predicts.

    With `merge` the winner takes the tokens of compatible branches along.
    """

    def select(self, view: RoundView, drafts: list[Draft]) -> Selection:
        config = self.config
        scores = lookahead.score(view, drafts, config)
        refused = lookahead.disagreements(view, drafts, config)
        found = lookahead.select(scores, refused)
        if not config.merge:
            return found
        merged = lookahead.merge(view, drafts, found.allowed, found.winner, config)
        return Selection(found.winner, scores, refused, merged)


class ExactPolicy(ScoredPolicy):
    """`accept="exact"`: drafts of the state that the anchor's fill rule is expected to lead to.

    The anchor wins. The decoder goes on from there as far as the round's other rows are the very
    rows that it would forward next.
    """

    def spawn(self, anchor: Anchor) -> list[Draft]:
        return exact_drafts.spawn(anchor, self.config)

    def select(self, view: RoundView, drafts: list[Draft]) -> Selection:
        return Selection(len(drafts), lookahead.score(view, drafts, self.config))


def make_policy(config: DecodeConfig) -> LookaheadPolicy:
    kinds = {"score": ScoredPolicy, "agreed": AgreedPolicy, "exact": ExactPolicy}
    return kinds[config.accept](config)
