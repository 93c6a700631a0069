"""`accept="exact"`: the tokens of no branches, whatever the drafts and however many."""

from __future__ import annotations

import itertools
import zlib
from array import array
from functools import cache

import numpy as np
import pytest
from made_up import EOS, MASK, MadeUp, new_decoder

from lopa.config import DecodeConfig
from lopa.decoding.decoder import Decoder
from lopa.decoding.exact_drafts import bits, candidates, likely_sets
from lopa.decoding.policy import ExactPolicy
from lopa.decoding.round_view import Anchor
from lopa.types import Draft, Lookahead, Plan, Round, Stats

WINDOWS = [
    {"block_size": 4, "append_at": 0.3, "activate_at": 0.6},
    {"block_size": 4, "append_at": 0.3, "activate_at": 0.6, "attention": "block"},
    {"block_size": 4, "append_at": 1.0, "attention": "block", "edit_threshold": 0.6},
    {"block_size": 4, "append_at": 0.3, "edit_threshold": 0.5, "edit_rounds": 2},
    {"window": "canvas"},
    {"window": "blocks", "block_size": 8, "cache": "none"},
    {"window": "blocks", "block_size": 8, "cache": "prefix"},
    {"window": "blocks", "block_size": 8, "cache": "dual"},
]


@cache
def checksum(numbers: tuple[int, ...]) -> int:
    return zlib.crc32(array("q", numbers).tobytes())


@cache
def known_share(row: tuple[int, ...]) -> float:
    return 1 - row.count(MASK) / len(row)


class SmoothlyMadeUp(MadeUp):
    """As a model is: a function of what a row attends to, and mostly as it was the round before.

    Under block attention that is all tokens up to the end of the position's block. Under full
    attention it is the row, and a checksum for each cached position of the whole row that committed
    it: keys and values depend on what lay to their right.
    """

    def __init__(self, seed: int, eos_share: float = 0.0) -> None:
        super().__init__(seed, eos_share=eos_share)
        self.cache: dict[int, int] = {}

    def stats(self, decoder: Decoder, plan: Plan) -> Stats:
        found = []
        before = tuple(decoder.tokens[: plan.start].tolist())
        for r in range(len(plan.rows)):
            end = int(plan.row_ends[r])
            row = tuple(plan.rows[r, : end - plan.start].tolist())
            # Cached positions within the row's own window are not read.
            others = tuple(self.cache[p] for p in range(plan.cached) if not plan.start <= p < end)
            for c in plan.wanted[r].nonzero()[0].tolist():
                position = plan.start + c
                if plan.block_ids is None:
                    found.append(self._predict(others, row, c, position))
                else:
                    own = np.count_nonzero(plan.block_ids[: len(row)] <= plan.block_ids[c])
                    found.append(self._predict((), before + row[:own], position, position))
        token, max_prob, ranking = zip(*found, strict=True)
        return Stats(np.array(token), np.array(max_prob), np.array(ranking))

    def commit(self, plan: Plan, row: int) -> None:
        seen = zlib.crc32(plan.rows[row, : plan.row_ends[row] - plan.start].tobytes())
        self.cache |= dict.fromkeys(range(plan.start, plan.start + plan.commit), seen)

    def _predict(
        self, others: tuple[int, ...], row: tuple[int, ...], column: int, position: int
    ) -> tuple[int, float, float]:
        nearby = [t for t in row[max(0, column - 2) : column + 3] if t != MASK]
        far, known = checksum((*others, *row)), known_share(row)
        base = self.at(0, (position,), position)
        near = self.at(0, tuple(nearby), position)
        probability = 0.6 * base[1] + 0.25 * near[1] + 0.1 * known
        probability = min(0.999, probability + 0.1 * self.at(0, (far,), position)[1])
        token = near[0] if near[1] > 0.85 else base[0]
        return token, float(np.float32(probability)), float(np.float32(np.log(probability)))


def run(decoder: Decoder, source: SmoothlyMadeUp) -> list[Round]:
    records = []
    source.cache = {}
    while (plan := decoder.plan()) is not None:
        stats = source.stats(decoder, plan)
        winner = decoder.choose(stats)
        source.commit(plan, winner)
        records.append(decoder.record())
    return records


class GoodAndBadGuesses(ExactPolicy):
    """Some of the usual drafts, random ones, and sets with wrong tokens; in any order."""

    def __init__(self, config: DecodeConfig, seed: int) -> None:
        super().__init__(config)
        self.rng = np.random.default_rng(seed)

    def spawn(self, anchor: Anchor) -> list[Draft]:
        drafts = super().spawn(anchor)
        free = anchor.free.nonzero()[0]
        for _ in range(len(drafts)):
            size = int(self.rng.integers(1, 4))
            chosen = self.rng.choice(free, size=min(size, len(free)), replace=False)
            drafts.append(
                tuple(
                    Lookahead(
                        anchor.view.offset + int(c),
                        int(anchor.view.token[anchor.row, c]) if self.rng.random() < 0.8 else 3,
                        0.0,
                        0.5,
                    )
                    for c in sorted(chosen)
                )
            )
        self.rng.shuffle(drafts)
        return drafts[: self.config.most_branches]


@pytest.mark.parametrize("shift", [True, False])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_tokens_are_those_of_no_branches(window: dict[str, object], shift: bool) -> None:
    saved = 0
    for seed in range(3):
        eos_share = 0.1 if seed % 2 else 0.0
        settings = {"max_new_tokens": 24, "threshold": 0.7, **window}
        source = SmoothlyMadeUp(seed, eos_share=eos_share)
        plain = new_decoder(DecodeConfig(branches=0, **settings), 6, shift)
        rounds = len(run(plain, source))
        for branches in (1, 3, 7, 15, "auto"):
            config = DecodeConfig(branches=branches, accept="exact", **settings)
            for policy in (None, GoodAndBadGuesses(config, seed)):
                decoder = new_decoder(config, 6, shift, policy=policy)
                records = run(decoder, source)
                assert decoder.tokens.tolist() == plain.tokens.tolist()
                assert decoder.finish == plain.finish
                assert len(records) <= rounds
                saved += rounds - len(records)
    assert saved > 0


def test_record_has_every_token_once() -> None:
    """The winner's lookaheads and the fills of all rounds are the answer."""
    config = DecodeConfig(accept="exact", max_new_tokens=24, threshold=0.7, block_size=8)
    decoder = new_decoder(config)
    placed: dict[int, int] = {}
    for record in run(decoder, SmoothlyMadeUp(3)):
        winner = record.branches[record.winner]
        for each in (*winner.lookaheads, *record.fills):
            assert each.position not in placed
            placed[each.position] = each.token
        taken = {(a.position, a.token) for a in winner.lookaheads}
        for branch in record.branches[:-1]:
            if not branch.refused:  # on the way to the winner
                assert {(a.position, a.token) for a in branch.lookaheads} <= taken
    tokens = decoder.tokens[decoder.prompt :].tolist()
    assert {decoder.prompt + i: t for i, t in enumerate(tokens) if t != MASK} == placed


@pytest.mark.parametrize("seed", range(5))
def test_likely_sets_against_all_sets(seed: int) -> None:
    odds = np.random.default_rng(seed).normal(size=7) * 2
    chance = 1 / (1 + np.exp(-odds))
    every = []
    for members in itertools.product([False, True], repeat=7):
        inside = np.array(members)
        every.append(float(np.where(inside, chance, 1 - chance).prod()))
    found = list(likely_sets(odds, 20))
    assert [c for c, _ in found] == pytest.approx(sorted(every, reverse=True)[:20])
    assert len({members for _, members in found}) == 20
    for value, members in found:
        inside = np.isin(np.arange(7), list(bits(members)))
        assert value == pytest.approx(float(np.where(inside, chance, 1 - chance).prod()))


def test_likely_sets_by_several_odds() -> None:
    odds = np.random.default_rng(0).normal(size=(3, 40)) * 2
    each = [found for row in odds for found in likely_sets(row, 8)]
    assert list(likely_sets(odds, 8)) == each


class Checked(ExactPolicy):
    """Compares what is found out for all masks at once with the plain definition."""

    compared = 0

    def spawn(self, anchor: Anchor) -> list[Draft]:
        view, free = anchor.view, anchor.free.nonzero()[0].tolist()
        # Of all rows: the one that has the most of the new anchor's tokens, and no others.
        fitting = [
            (len(draft), row == anchor.row, -row)
            for row, draft in enumerate([*anchor.drafts, ()])
            if all(
                a.position - view.offset < len(anchor.tokens)
                and anchor.tokens[a.position - view.offset] == a.token
                for a in draft
            )
        ]
        best = -max(fitting)[-1]
        placed = [a.position - view.offset for a in [*anchor.drafts, ()][best]]
        seen = {c for c, masked in enumerate(view.masks[-1]) if not masked} | {*placed}
        new = {*range(len(anchor.tokens))} - seen - {*free}

        found = candidates(anchor, self.config.threshold)
        assert found.columns.tolist() == free
        for index, column in enumerate(free):
            row = best if view.masks[best, column] else anchor.row
            assert found.token[index] == view.token[row, column]
            assert found.max_prob[index] == view.max_prob[row, column]
            assert found.ranking[index] == view.ranking[row, column]
            prob = min(max(view.max_prob[row, column], 0.001), 0.999)
            odds = prob / (1 - prob) / (self.config.threshold / (1 - self.config.threshold))
            distance = min([view.size, *(abs(column - c) for c in new)])
            left = float(column == 0 or column - 1 not in free)
            features = [np.log(odds), np.exp(-distance / 2), left, np.log(1 + index)]
            assert found.features[index].tolist() == pytest.approx(features)
        drafts = super().spawn(anchor)
        for draft in drafts:
            assert [a.position for a in draft] == sorted({a.position for a in draft})
            for ahead in draft:
                index = free.index(ahead.position - view.offset)
                assert ahead.token == found.token[index]
                assert ahead.confidence == found.ranking[index]
                assert ahead.max_prob == found.max_prob[index]
            # A fully activated block with masks has a fill.
            filled = {(a.position - view.offset) // view.size for a in draft}
            open_blocks = {column // view.size for column in free}
            assert filled >= open_blocks & {*anchor.may_force.nonzero()[0].tolist()}
        type(self).compared += len(drafts)
        return drafts


def test_candidates_against_the_plain_definition() -> None:
    for seed in range(4):
        config = DecodeConfig(accept="exact", max_new_tokens=24, threshold=0.7, **WINDOWS[seed % 2])
        run(new_decoder(config, policy=Checked(config)), SmoothlyMadeUp(seed, eos_share=0.05))
    assert Checked.compared > 50


def test_eos_is_a_lookahead_like_any_other() -> None:
    config = DecodeConfig(accept="exact", max_new_tokens=16, threshold=0.7, block_size=8)
    decoder = new_decoder(config)
    records = run(decoder, SmoothlyMadeUp(1, eos_share=0.5))
    assert any(a.token == EOS for r in records for draft in r.spawned for a in draft)
