"""Made-up statistics: a function of the row's tokens and the position, no model."""

from __future__ import annotations

import hashlib
import struct
from array import array
from typing import Any

import numpy as np

from lopa.config import DecodeConfig
from lopa.decoding.decoder import Decoder
from lopa.decoding.policy import LookaheadPolicy
from lopa.decoding.round_cost import EVERY_ROUND_THE_SAME, RoundCost
from lopa.types import Plan, Round, Stats

MASK, EOS, VOCAB = 9, 8, 8


class MadeUp:
    """Draws for (round, row, position) depend on those alone, so every caller sees the same.

    `levels` rounds the confidences, to make ties; `eos_share` is how often EOS is predicted.
    """

    def __init__(self, seed: int, levels: int | None = None, eos_share: float = 0.0) -> None:
        self.seed, self.levels, self.eos_share = seed, levels, eos_share

    def at(self, index: int, row: tuple[int, ...], position: int) -> tuple[int, float, float]:
        key = array("q", [self.seed, index, position, *row]).tobytes()
        # A digest for a generator: to make one takes 50 µs.
        digest = hashlib.blake2b(key, digest_size=12).digest()
        draw, of_eos, of_token = struct.unpack("3I", digest)
        probability = (draw >> 8) / 2**24  # as many bits as float32 has
        if self.levels:
            probability = round(probability * self.levels) / self.levels
        token = EOS if of_eos / 2**32 < self.eos_share else of_token % VOCAB
        return token, probability, float(np.float32(np.log(probability + 1e-3)))

    def stats(self, decoder: Decoder, plan: Plan) -> Stats:
        before = decoder.tokens[: plan.start].tolist()
        found = []
        for r, c in zip(*np.nonzero(plan.wanted), strict=True):
            row = (*before, *plan.rows[r, : plan.row_ends[r] - plan.start].tolist())
            found.append(self.at(plan.index, row, plan.start + int(c)))
        token, max_prob, ranking = zip(*found, strict=True)
        return Stats(np.array(token), np.array(max_prob), np.array(ranking))


class MadeUpRanking(MadeUp):
    """Ranks by another draw than the probability, so that neither can stand in for the other.

    `steady` is the share of tokens that depend on nothing but the position: whatever is filled
    elsewhere, they are predicted again.
    """

    def __init__(self, steady: float = 0.0, **options: Any) -> None:
        super().__init__(**options)
        self.steady = steady
        self.drawn: dict[Any, tuple[int, float, float]] = {}  # both sides ask for the same

    def at(self, index: int, row: tuple[int, ...], position: int) -> tuple[int, float, float]:
        key = index, row, position
        if key not in self.drawn:
            token, max_prob, _ = super().at(*key)
            *_, ranking = super().at(index, row, position + 1000)
            if super().at(index, row, position + 2000)[1] < self.steady:
                token, *_ = super().at(0, (), position)
            self.drawn[key] = token, max_prob, ranking
        return self.drawn[key]


def new_decoder(
    config: DecodeConfig,
    prompt: int = 5,
    shift: bool = True,
    aligned: bool = False,
    cost: RoundCost = EVERY_ROUND_THE_SAME,
    policy: LookaheadPolicy | None = None,
) -> Decoder:
    return Decoder(
        config,
        [i % VOCAB for i in range(prompt)],
        mask_id=MASK,
        eos_ids=[EOS],
        shift=shift,
        aligned=aligned,
        cost=cost,
        policy=policy,
    )


def drive(decoder: Decoder, source: MadeUp) -> list[Round]:
    records = []
    while (plan := decoder.plan()) is not None:
        records.append(advance(decoder, source.stats(decoder, plan)))
    return records


def advance(decoder: Decoder, stats: Stats) -> Round:
    """A whole round."""
    winner = decoder.choose(stats)
    record = decoder.record()
    assert record.winner == winner
    return record
