"""The decoder under policies of one's own, on made-up statistics."""

from __future__ import annotations

import itertools
import pickle

from made_up import MadeUp, advance, drive, new_decoder

from lopa.config import DecodeConfig
from lopa.decoding.lookahead import Selection, select
from lopa.decoding.outcome import Outcome
from lopa.decoding.policy import ScoredPolicy
from lopa.decoding.round_view import RoundView
from lopa.types import BoolArray, Lookahead

CONFIG = DecodeConfig(branches=3, max_new_tokens=48, block_size=8, early_stop=False)


class Agreeing(ScoredPolicy):
    """A branch may win only if the anchor of the same round still names its token."""

    def __init__(self, config: DecodeConfig) -> None:
        super().__init__(config)
        self.outcomes: list[Outcome] = []

    def select(self, view: RoundView, drafts: list[Lookahead]) -> Selection:
        scores = super().select(view, drafts).scores
        anchor = view.token[-1]
        refused = tuple(
            (row, f"the anchor says {anchor[draft.position - view.offset]}")
            for row, draft in enumerate(drafts)
            if anchor[draft.position - view.offset] != draft.token
        )
        allowed = scores.copy()
        allowed[[row for row, _ in refused]] = -1e9
        return Selection(select(allowed).winner, scores, refused)

    def observe(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)


class Leftmost(ScoredPolicy):
    """Drafts from left to right."""

    def spawn(self, view: RoundView, row: int, free: BoolArray) -> list[Lookahead]:
        drafts = super().spawn(view, row, free)
        return sorted(drafts, key=lambda draft: draft.position)


def test_a_policy_refuses_branches_by_what_the_anchor_says() -> None:
    policy = Agreeing(CONFIG)
    records = drive(new_decoder(CONFIG, policy=policy), MadeUp(3))
    assert len(policy.outcomes) == len(records)
    refused = 0
    for record, outcome in zip(records, policy.outcomes, strict=True):
        assert outcome.winner == record.winner
        if outcome.selection is None:
            assert len(record.branches) == 1
            continue
        assert record.winner not in dict(outcome.selection.refused)
        assert [b.score for b in record.branches] == outcome.selection.scores.tolist()
        refused += len(outcome.selection.refused)
    assert refused > 0
    assert any(record.winner < len(record.branches) - 1 for record in records)


def test_a_policy_chooses_the_drafts() -> None:
    records = drive(new_decoder(CONFIG, policy=Leftmost(CONFIG)), MadeUp(3))
    for record, following in itertools.pairwise(records):
        positions = [draft.position for draft in record.spawned]
        assert positions == sorted(positions)
        assert [b.lookahead for b in following.branches[:-1]] == record.spawned


def test_the_configured_policy_is_the_default() -> None:
    given = new_decoder(CONFIG, policy=ScoredPolicy(CONFIG))
    assert drive(given, MadeUp(5)) == drive(new_decoder(CONFIG), MadeUp(5))


def test_a_policy_goes_to_another_process_with_its_decoder() -> None:
    decoder, source = new_decoder(CONFIG, policy=Agreeing(CONFIG)), MadeUp(3)
    for _ in range(3):
        plan = decoder.plan()
        assert plan is not None
        advance(decoder, source.stats(decoder, plan))
    copy = pickle.loads(pickle.dumps(decoder))
    assert drive(copy, source) == drive(decoder, source)
