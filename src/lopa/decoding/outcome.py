"""The outcome: a round as it was decided.

The budget learns from it, a policy observes it, and the round's record is made of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lopa.decoding.fill import Filled, FillRule, with_others
from lopa.decoding.lookahead import Selection
from lopa.decoding.round_view import RoundView, eos_mask
from lopa.decoding.windows import Frame
from lopa.types import BoolArray, Draft, Plan, Stats


class Fills(NamedTuple):
    """What a row was filled with, over the columns of the view."""

    masks: list[int]  # by block, before
    step: int  # how many rounds the first block had had
    chosen: BoolArray  # [N]
    columns: list[int]  # where that is
    tokens: list[int]  # one per column
    forced: list[int]  # those columns that were forced
    merged: list[int]  # those columns that the row's own rule would not have filled
    edited: list[int]  # columns of tokens that were replaced


@dataclass(slots=True, eq=False)
class Outcome:
    """What a round found, and what was chosen."""

    plan: Plan
    frame: Frame
    stats: Stats
    view: RoundView
    drafts: list[Draft]  # of each row but the last, the anchor
    has_eos: list[bool]  # [R] rows that held an EOS token before the fills
    selection: Selection | None  # None: the anchor was alone
    winner: int
    chain: list[int]  # rows that were taken in turn, the winner last; several by `exact` alone
    fills: Fills  # of the winner
    spawned: list[Draft]  # drafts for the next round
    fill_rule: FillRule
    prompt: int  # its length

    def brought(self, rows: list[int], merged: Sequence[BoolArray | None] = ()) -> list[int]:
        """Tokens that each of these rows would bring as the winner, its draft included.

        Those behind an EOS token do not count. merged: what each would take from others.
        """
        view, rule = self.view, self.fill_rule
        if rule.config.window == "pipeline":  # every row at once
            filled = rule.fills(view.cells(rows, self.frame), self.fills.step)
        else:
            each = [rule.fills(view.cells(row, self.frame), self.fills.step)[:2] for row in rows]
            filled = Filled(*(np.stack(part) for part in zip(*each, strict=True)))
        for index, others in enumerate(merged):
            if others is not None:
                own = Filled(filled.chosen[index], filled.forced[index])
                added = others & view.masks[rows[index]] & ~(own.chosen & ~own.forced).reshape(-1)
                filled.chosen[index], filled.forced[index], _ = with_others(own, added)
        passed, forced = filled.chosen.reshape(len(rows), -1), np.zeros(len(rows), np.int64)
        if rule.config.window == "pipeline":
            passed = passed & ~filled.forced.reshape(passed.shape)
            forced = filled.forced.sum(axis=(1, 2))
        over = passed & view.is_eos[rows]
        if any(self.has_eos):  # some are there already; those of a prompt are none
            columns = np.arange(view.offset, view.offset + passed.shape[1])
            there = self.plan.rows[rows][:, columns - self.plan.start]
            over |= eos_mask(there, view.eos_ids) & (columns >= self.prompt)
        if over.any():
            passed = passed & (np.cumsum(over, axis=1) - over == 0)
        counts = (passed.sum(axis=1) + forced).tolist()
        placed = [*map(len, self.drafts), 0]
        return [n + placed[row] for row, n in zip(rows, counts, strict=True)]
