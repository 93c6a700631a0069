"""`merge`: what the winner takes from branches that agree; test_plain_loop.py has whole runs."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from made_up import EOS, MadeUpRanking, advance, new_decoder

from lopa.config import AUTO_BRANCHES, DecodeConfig
from lopa.decoding import branch_budget
from lopa.decoding.decoder import Decoder
from lopa.decoding.fill import Filled, with_others
from lopa.decoding.lookahead import merge
from lopa.decoding.outcome import Outcome
from lopa.decoding.policy import AgreedPolicy
from lopa.decoding.round_view import RoundView
from lopa.types import Draft, Lookahead

CONFIG = DecodeConfig(threshold=0.9, agreement=0.25, agreement_ahead=0.75)
OFFSET, COLUMNS = 10, 6

# What a row predicts by column, where it is not what all predict.
Changes = dict[int, tuple[int, float]]


def merged(
    *rows: Changes,
    scores: tuple[float, ...] = (3.0, 2.0, 1.0),
    winner: int = 0,
    ends: tuple[int, ...] = (),
) -> list[int] | None:
    """The columns that are merged. All rows predict token c at column c with probability 0.5, and
    branch r has placed token r at column r. ends: of the rows, in columns."""
    count = len(rows) + 1  # and the anchor
    token = np.tile(np.arange(COLUMNS), (count, 1))
    max_prob = np.full((count, COLUMNS), 0.5)
    masks = np.arange(COLUMNS) < np.array(ends or [COLUMNS] * count)[:, None]
    for row, changes in enumerate(rows):
        for column, (predicted, prob) in changes.items():
            token[row, column], max_prob[row, column] = predicted, np.float32(prob)
        masks[row, row] = False
    token[~masks], max_prob[~masks] = -1, np.nan
    view = RoundView(OFFSET, 3, masks, token, max_prob, max_prob, [EOS])
    drafts: list[Draft] = [(Lookahead(OFFSET + r, r, -1.0, 0.4),) for r in range(len(rows))]
    allowed = [*scores[: len(rows)], 0.0]
    found = merge(view, drafts, allowed, winner, CONFIG)
    return None if found is None else found.nonzero()[0].tolist()


def test_two_that_predict_each_other() -> None:
    assert merged({}, {}) == [1]
    assert merged({}, {}, winner=1, scores=(1.0, 2.0)) == [0]
    assert merged({}) is None  # nobody else is there
    assert merged({}, {}, winner=2) is None  # the anchor takes nothing


@pytest.mark.parametrize(
    "rows",
    [
        ({1: (5, 0.5)}, {}),  # the winner expects another token
        ({}, {0: (5, 0.5)}),  # the other does
        ({1: (1, 0.25)}, {}),  # the same token, but not above `agreement`
        ({}, {0: (0, 0.25)}),
    ],
)
def test_the_prediction_must_be_mutual(rows: tuple[Changes, Changes]) -> None:
    assert merged(*rows) is None


def test_to_predict_is_to_be_above_the_agreement() -> None:
    assert merged({1: (1, 0.2500001)}, {0: (0, 0.2500001)}) == [1]
    # Whatever block it is in: `agreement_ahead` is for the anchor.
    assert merged({}, {}, {}, {}) == [1, 2, 3]


def test_no_other_token_where_one_before_is_confident() -> None:
    assert merged({3: (3, 0.95)}, {3: (5, 0.3)}) is None
    assert merged({3: (3, 0.95)}, {3: (EOS, 0.3)}) is None
    assert merged({3: (3, 0.95)}, {3: (3, 0.1)}) == [1]  # the same, however unlikely
    assert merged({3: (3, 0.9)}, {3: (5, 0.3)}) == [1]  # the threshold itself is not above
    assert merged({3: (EOS, 0.95)}, {3: (5, 0.3)}) == [1]  # what ends the text does not count
    assert merged({3: (5, 0.3)}, {3: (3, 0.95)}) == [1]  # nor what the later one is confident of


def test_every_one_before_counts() -> None:
    second, third = {3: (3, 0.95)}, {3: (5, 0.3)}
    assert merged({}, second, third) == [1, 3]
    assert merged({}, {}, third) == [1, 2]
    assert merged({}, {2: (5, 0.5)}, {}) == [1]  # the second does not predict the third's token


def test_confident_tokens_of_another_are_taken() -> None:
    assert merged({}, {3: (3, 0.95)}) == [1, 3]
    assert merged({3: (3, 0.95)}, {3: (3, 0.95)}) == [1, 3]
    assert merged({}, {3: (3, 0.9)}) == [1]
    assert merged({3: (3, 0.25)}, {3: (3, 0.95)}) == [1]  # the winner hardly predicts it
    assert merged({}, {3: (3, 0.3)}, {3: (3, 0.95)}) == [1, 2, 3]
    assert merged({}, {3: (3, 0.25)}, {3: (3, 0.95)}) == [1, 2]  # all before it have to


def test_eos_is_not_merged() -> None:
    end = {3: (EOS, 0.95)}
    assert merged({3: (EOS, 0.5)}, end) == [1]
    assert merged(end, end) == [1]


def test_the_best_scored_goes_first() -> None:
    """The second and the third do not fit each other."""
    rows: tuple[Changes, ...] = ({}, {2: (5, 0.5)}, {})
    assert merged(*rows, scores=(3.0, 2.0, 1.0)) == [1]
    assert merged(*rows, scores=(3.0, 1.0, 2.0)) == [2]
    assert merged(*rows, scores=(3.0, 2.0, 2.0)) == [1]  # of equals the better ranked
    assert merged(*rows, scores=(3.0, -np.inf, 1.0)) == [2]  # one that may not win
    assert merged(*rows, scores=(2.0, 1.0, 2.0), winner=2) == [0]
    assert merged(*rows, scores=(3.0, -np.inf, -np.inf)) is None
    assert merged(*rows, scores=(3.0, -2.0, -1.0)) == [2]  # behind the anchor is no matter


def test_rows_of_different_length() -> None:
    """What the winner does not reach it is not filled with; what another does not reach is none of
    its concern."""
    assert merged({}, {4: (4, 0.95)}, ends=(3, 6, 6)) == [1]
    assert merged({4: (4, 0.95)}, {}, ends=(6, 3, 6)) == [1]
    # A lookahead token that the winner cannot predict.
    assert merged({}, {}, {}, ends=(2, 6, 6, 6)) == [1]


def plainly_merged(
    view: RoundView, drafts: list[Draft], allowed: list[float], winner: int
) -> list[int] | None:
    """By the definition, column by column; the drafts are at one column each."""

    def predicts(row: int, column: int, token: int) -> bool:
        return view.token[row, column] == token and view.max_prob[row, column] > CONFIG.agreement

    def confident(row: int, column: int) -> bool:
        above = view.max_prob[row, column] > np.float32(CONFIG.threshold)
        return bool(above) and view.token[row, column] != EOS

    placed = [(ahead.position - view.offset, ahead.token) for (ahead,) in drafts]
    joined, added = [winner], set()
    for row in sorted(range(len(drafts)), key=lambda row: -allowed[row]):
        if row == winner or allowed[row] == -np.inf:
            continue
        if not all(predicts(b, *placed[row]) and predicts(row, *placed[b]) for b in joined):
            continue
        masks = view.masks[row].nonzero()[0].tolist()
        if any(
            confident(b, c) and view.token[b, c] != view.token[row, c]
            for b in joined
            for c in masks
        ):
            continue
        for c in masks:
            if confident(row, c) and all(predicts(b, c, view.token[row, c]) for b in joined):
                added.add(c)
        added.add(placed[row][0])
        joined.append(row)
    return sorted(added) if added else None


def test_against_the_plain_definition() -> None:
    sizes = set()
    for seed in range(400):
        rng = np.random.default_rng(seed)
        branches, columns = int(rng.integers(2, 9)), 12
        shape = branches + 1, columns
        token = np.where(rng.random(shape) < 0.95, np.arange(columns), rng.integers(0, 5, shape))
        token[rng.random(shape) < 0.03] = EOS
        max_prob = np.round(rng.random(shape) ** 0.5, 2)
        ends = rng.choice([8, 12, 12], size=(branches + 1, 1))
        masks = (rng.random(columns) < 0.9) & (np.arange(columns) < ends)
        places = rng.choice(columns, size=branches, replace=False).tolist()
        for row, column in enumerate(places):
            masks[row, column] = False
        token[~masks], max_prob[~masks] = -1, np.nan
        view = RoundView(OFFSET, 4, masks, token, max_prob, max_prob, [EOS])
        drafts: list[Draft] = [(Lookahead(OFFSET + c, c, -1.0, 0.4),) for c in places]
        scores = rng.integers(0, 4, branches + 1).astype(np.float64)
        scores[:-1][rng.random(branches) < 0.1] = -np.inf
        winner = int(scores.argmax())
        found = merge(view, drafts, scores.tolist(), winner, CONFIG)
        expected = None
        if winner < branches:
            expected = plainly_merged(view, drafts, scores.tolist(), winner)
        assert (None if found is None else found.nonzero()[0].tolist()) == expected
        sizes.add(0 if expected is None else len(expected))
    assert sizes >= {0, 1, 2, 3, 4}


def filled(chosen: list[int], forced: list[int]) -> Filled:
    cells = np.zeros((2, 6), np.bool_)
    cells[0, chosen + forced] = cells[1, forced] = True
    return Filled(*cells.reshape(2, 2, 3))


@pytest.mark.parametrize(
    ("before", "others", "after"),
    [
        (filled([0], []), [4], filled([0, 4], [])),
        (filled([], [1, 4]), [0], filled([0], [4])),  # the other block still forces
        (filled([], [1]), [1], filled([1], [])),  # the same token is not forced any more
        (filled([2], [5]), [3, 4], filled([2, 3, 4], [])),
        (filled([], [1, 4]), [], filled([], [1, 4])),
    ],
)
def test_a_block_that_has_a_token_of_others_forces_nothing(
    before: Filled, others: list[int], after: Filled
) -> None:
    added = np.zeros(6, np.bool_)
    added[others] = True
    found = with_others(before, added)
    assert [x.tolist() for x in found[:2]] == [x.tolist() for x in after[:2]]


WINDOWS: dict[str, dict[str, Any]] = {
    "pipeline": {"block_size": 6, "append_at": 0.3, "activate_at": 0.5},
    "blocks": {"window": "blocks", "block_size": 12},
    "canvas": {"window": "canvas"},
}


class Watched(AgreedPolicy):
    """Keeps the last outcome."""

    outcome: Outcome

    def observe(self, outcome: Outcome) -> None:
        self.outcome = outcome


def watched(window: str, seed: int, **options: Any) -> tuple[Decoder, Watched, MadeUpRanking]:
    """Where most rows predict the same, some with confidence."""
    config = DecodeConfig(
        max_new_tokens=24, threshold=(0.75, 0.9)[seed % 2], **options, **WINDOWS[window]
    )
    policy = Watched(config)
    source = MadeUpRanking(seed=seed, steady=(0.9, 1.1)[seed % 2])
    return new_decoder(config, policy=policy, shift=seed % 4 < 2), policy, source


@pytest.mark.parametrize("window", WINDOWS)
def test_what_a_round_brought_is_what_was_filled(window: str) -> None:
    """With what it took from others; without that it is what it would have been without them."""
    merging = 0
    for seed in range(8):
        decoder, policy, source = watched(window, seed, branches=5)
        while True:
            alone = copy.deepcopy(decoder)
            if (plan := decoder.plan()) is None:
                break
            record = advance(decoder, source.stats(decoder, plan))
            outcome = policy.outcome
            if outcome.selection is None:
                continue
            winner, merged = record.winner, outcome.selection.merged
            placed = len(record.branches[winner].lookaheads)
            assert outcome.brought([winner], [merged]) == [placed + len(record.fills)]
            if merged is None:
                continue
            merging += 1
            alone.drafts = alone.drafts[winner : winner + 1]  # nobody to take from
            plan = alone.plan()
            assert plan is not None
            single = advance(alone, source.stats(alone, plan))
            if single.winner == 0:
                expected = [1 + len(single.fills)]
                assert outcome.brought([winner]) == outcome.brought([winner], [None]) == expected
    assert merging > 5


@pytest.mark.parametrize("window", WINDOWS)
def test_the_budget_learns_what_fewer_branches_would_have_merged(
    window: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the same round had been decoded with the first of its drafts alone."""
    monkeypatch.setattr(branch_budget, "LEARN_EVERY", 1)
    compared = differing = 0
    for seed in range(8):
        decoder, _, source = watched(window, seed, branches="auto", objective="tpf")
        assert decoder.auto is not None
        learnt: list[list[int]] = []
        learn = decoder.auto.budget.learn

        def note(tokens: Any, learnt: Any = learnt, learn: Any = learn) -> None:
            learnt.append(list(tokens))
            learn(tokens)

        decoder.auto.budget.learn = note  # type: ignore[method-assign]
        while True:
            before = copy.deepcopy(decoder)
            if (plan := decoder.plan()) is None:
                break
            advance(decoder, source.stats(decoder, plan))
            drafts = before.drafts
            counts = [*(k for k in AUTO_BRANCHES if k < len(drafts)), len(drafts)]
            if not drafts:
                assert learnt[-1] == []
                continue
            assert len(learnt[-1]) == len(counts)
            for count, tokens in zip(counts, learnt[-1], strict=True):
                fewer = copy.deepcopy(before)
                fewer.drafts, fewer.auto = drafts[:count], None
                plan = fewer.plan()
                assert plan is not None
                record = advance(fewer, source.stats(fewer, plan))
                placed = len(record.branches[record.winner].lookaheads)
                assert tokens == placed + len(record.fills)
                compared += any(fill.kind == "merged" for fill in record.fills)
                differing += tokens != learnt[-1][-1]
    assert compared > 10
    assert differing > 10


def test_nothing_is_merged_unless_asked() -> None:
    kinds = set()
    for seed in range(4):
        decoder, _, source = watched("pipeline", seed, branches=5, merge=False)
        while (plan := decoder.plan()) is not None:
            kinds |= {fill.kind for fill in advance(decoder, source.stats(decoder, plan)).fills}
    assert kinds == {"threshold", "forced"}
