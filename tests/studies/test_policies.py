"""The policies of the studies, on made-up statistics."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from made_up import EOS, MASK, MadeUp, drive, new_decoder

from lopa.config import DecodeConfig
from lopa.decoding.policy import ScoredPolicy
from lopa.studies.policies import (
    LeastConfident,
    Observed,
    RandomOrder,
    RandomPositions,
    RandomWinner,
)
from lopa.studies.spearman import spearman

CONFIG = DecodeConfig(branches=3, max_new_tokens=32, block_size=8, early_stop=False)


def decode(make: Any, config: DecodeConfig = CONFIG) -> Any:
    decoder = new_decoder(config, policy=make(config))
    return decoder, drive(decoder, MadeUp(3))


@pytest.mark.parametrize("kind", [RandomPositions, RandomWinner, RandomOrder])
def test_chance_is_the_seeds(kind: Any) -> None:
    runs = [decode(partial(kind, seed=seed))[1] for seed in (1, 1, 2)]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_a_random_order_places_a_token_in_every_round() -> None:
    config = DecodeConfig(branches=1, max_new_tokens=32, block_size=8, early_stop=False)
    decoder, records = decode(RandomOrder, config)
    for record in records:
        has_lookahead = len(record.branches) == 2
        assert len(record.branches[record.winner].lookaheads) == has_lookahead
    assert MASK not in decoder.tokens


def test_observing_changes_nothing() -> None:
    decoder, records = decode(Observed)
    assert records == decode(ScoredPolicy)[1]
    notes = decoder.policy.notes
    noted = zip(records, notes["scores"], notes["brought"], notes["placed"], strict=True)
    for record, scores, tokens, placed in noted:
        assert scores["mean"] == [branch.score for branch in record.branches]
        lookaheads = record.branches[record.winner].lookaheads
        assert placed == (lookaheads[0].max_prob if lookaheads else None)
        fills = [f.token for f in record.fills]
        if EOS not in fills:
            assert tokens[record.winner] == len(fills) + len(lookaheads)


def test_the_least_confident_first() -> None:
    _, records = decode(LeastConfident)
    for record in records:
        ranked = [a.confidence for (a,) in record.spawned]
        assert ranked == sorted(ranked, reverse=True)  # of the negated ranking


def test_rank_correlation() -> None:
    assert spearman([1, 2, 3], [10, 20, 90]) == pytest.approx(1.0)
    assert spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1.0)
    # By hand: ranks 0, 1.5, 1.5, 3 against 0, 1, 2, 3.
    expected = np.corrcoef([0, 1.5, 1.5, 3], [0, 1, 2, 3])[0, 1]
    assert spearman([5, 6, 6, 9], [1, 2, 3, 4]) == pytest.approx(expected)
    assert spearman([1, 1], [1, 2]) is None
    assert spearman([1], [1]) is None
