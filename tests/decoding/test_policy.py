"""The decoder under policies of one's own, on made-up statistics."""

from __future__ import annotations

import itertools
import pickle

from made_up import MadeUp, advance, drive, new_decoder

from lopa.config import DecodeConfig
from lopa.decoding.lookahead import Selection, select
from lopa.decoding.outcome import Outcome
from lopa.decoding.policy import AgreedPolicy, ExactPolicy, ScoredPolicy
from lopa.decoding.round_view import Anchor, RoundView
from lopa.types import Draft

CONFIG = DecodeConfig(branches=3, max_new_tokens=48, block_size=8, early_stop=False)


class Nearby(ScoredPolicy):
    """A branch may win only if its token is one of the four next to the first mask."""

    def __init__(self, config: DecodeConfig) -> None:
        super().__init__(config)
        self.outcomes: list[Outcome] = []

    def select(self, view: RoundView, drafts: list[Draft]) -> Selection:
        scores = super().select(view, drafts).scores
        first = view.offset + int(view.masks[-1].argmax())
        far = {row: ahead.position - first for row, (ahead,) in enumerate(drafts)}
        refused = {row: f"{away} away" for row, away in far.items() if away > 4}
        return select(scores, refused)

    def observe(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)


class Leftmost(ScoredPolicy):
    """Drafts from left to right."""

    def spawn(self, anchor: Anchor) -> list[Draft]:
        return sorted(super().spawn(anchor), key=lambda draft: draft[0].position)


def test_a_policy_refuses_branches_for_reasons_of_its_own() -> None:
    policy = Nearby(CONFIG)
    records = drive(new_decoder(CONFIG, policy=policy), MadeUp(3))
    assert len(policy.outcomes) == len(records)
    refused = 0
    for record, outcome in zip(records, policy.outcomes, strict=True):
        assert outcome.winner == record.winner
        if outcome.selection is None:
            assert len(record.branches) == 1
            continue
        assert record.winner not in outcome.selection.refused
        reasons = {row: b.refused for row, b in enumerate(record.branches) if b.refused}
        assert reasons == outcome.selection.refused
        assert [b.score for b in record.branches] == outcome.selection.scores.tolist()
        refused += len(outcome.selection.refused)
    assert refused > 0
    assert any(record.winner < len(record.branches) - 1 for record in records)


def test_a_policy_chooses_the_drafts() -> None:
    records = drive(new_decoder(CONFIG, policy=Leftmost(CONFIG)), MadeUp(3))
    for record, following in itertools.pairwise(records):
        positions = [ahead.position for (ahead,) in record.spawned]
        assert positions == sorted(positions)
        assert [b.lookaheads for b in following.branches[:-1]] == record.spawned


def test_the_configured_policy_is_the_default() -> None:
    kinds = {"score": ScoredPolicy, "agreed": AgreedPolicy, "exact": ExactPolicy}
    for accept, kind in kinds.items():
        config = DecodeConfig(max_new_tokens=48, block_size=8, accept=accept)  # type: ignore[arg-type]
        given = new_decoder(config, policy=kind(config))
        assert type(new_decoder(config).policy) is kind
        assert drive(given, MadeUp(5)) == drive(new_decoder(config), MadeUp(5))


def test_a_policy_goes_to_another_process_with_its_decoder() -> None:
    decoder, source = new_decoder(CONFIG, policy=Nearby(CONFIG)), MadeUp(3)
    for _ in range(3):
        plan = decoder.plan()
        assert plan is not None
        advance(decoder, source.stats(decoder, plan))
    copy = pickle.loads(pickle.dumps(decoder))
    assert drive(copy, source) == drive(decoder, source)
