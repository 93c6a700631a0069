"""The lookahead policy: which drafts a round tries, and which branch wins.

These two choices make lookahead; everything else is the decoder's. How many of the drafts are tried
with `branches="auto"` is its budget's.
"""

from __future__ import annotations

from typing import Protocol

from lopa.config import DecodeConfig
from lopa.decoding import lookahead
from lopa.decoding.lookahead import Selection
from lopa.decoding.outcome import Outcome
from lopa.decoding.round_view import RoundView
from lopa.types import BoolArray, Lookahead


class LookaheadPolicy(Protocol):
    """One per sequence. Every rank runs its own, so chance comes from a seed."""

    def spawn(self, view: RoundView, row: int, free: BoolArray) -> list[Lookahead]:
        """Drafts for the next round, the best first, one branch each.

        row: the winner. free: [N] its masks that are left to look ahead at, of its own blocks.
        """

    def select(self, view: RoundView, drafts: list[Lookahead]) -> Selection:
        """The winner. drafts: at least one; of all rows but the last, the anchor."""

    def observe(self, outcome: Outcome) -> None:
        """A round is over, and the next one has been launched."""


class ScoredPolicy:
    """As configured: drafts on the best-ranked masks, and the branch with the best score."""

    def __init__(self, config: DecodeConfig) -> None:
        self.config = config

    def spawn(self, view: RoundView, row: int, free: BoolArray) -> list[Lookahead]:
        return lookahead.spawn(view, row, free, view.ranking[row], self.config)

    def select(self, view: RoundView, drafts: list[Lookahead]) -> Selection:
        return lookahead.select(lookahead.score(view, drafts, self.config))

    def observe(self, outcome: Outcome) -> None:
        """It has nothing to learn."""
