"""The record of a round, for the trace: made from its outcome when there is time."""

from __future__ import annotations

from io import BytesIO

import numpy as np

from lopa.decoding import lookahead
from lopa.decoding.outcome import Outcome
from lopa.decoding.round_view import RoundView
from lopa.types import (
    BlockView,
    Branch,
    Draft,
    Fill,
    FillKind,
    Opinion,
    Round,
)

NOT_REACHED = "not what the anchor fills"


def make_record(outcome: Outcome, blocks: list[BlockView]) -> Round:
    """blocks: of the winner, as the round found them."""
    plan = outcome.plan
    return Round(
        index=plan.index,
        start=plan.start,
        cached=plan.cached,
        committed=plan.commit,
        branches=_branches(outcome),
        winner=outcome.winner,
        fills=_fills(outcome),
        spawned=[list(draft) for draft in outcome.spawned],
        blocks=blocks,
    )


def _branches(outcome: Outcome) -> list[Branch]:
    view = outcome.view
    if outcome.selection is None:  # nobody needed a score
        scores = lookahead.score(view, [], outcome.fill_rule.config)
    else:
        scores = outcome.selection.scores
    refused = dict(outcome.selection.refused) if outcome.selection is not None else {}
    if outcome.fill_rule.config.accept == "exact":
        others = set(range(len(outcome.drafts))) - {*outcome.chain}
        refused |= dict.fromkeys(others, NOT_REACHED)
    counts: list[int] = view.masks.sum(axis=1).tolist()
    by_row = (
        [list(draft) for draft in (*outcome.drafts, ())],
        scores.tolist(),
        counts,
        outcome.frame.row_ends,
        outcome.has_eos,
        _opinions(view, outcome.drafts),
        [refused.get(row, "") for row in range(len(scores))],
        _landscapes(outcome, counts),
    )
    return [Branch(*row) for row in zip(*by_row, strict=True)]


def _opinions(view: RoundView, drafts: list[Draft]) -> list[list[Opinion]]:
    """Of each row; nobody asks the anchor about itself."""
    token, max_prob = view.token[-1], view.max_prob[-1]
    found: list[list[Opinion]] = [[] for _ in (*drafts, ())]
    for draft, opinions in zip(drafts, found, strict=False):
        for ahead in draft:
            column = ahead.position - view.offset
            opinions.append(Opinion(token.item(column), max_prob.item(column)))
    return found


def _fills(outcome: Outcome) -> list[Fill]:
    view, row, found = outcome.view, outcome.winner, outcome.fills
    max_prob, usual = view.max_prob[row], outcome.fill_rule.kind
    fills = []
    for c, token in zip(found.columns, found.tokens, strict=True):
        kind: FillKind = "forced" if c in found.forced else "merged" if c in found.merged else usual
        fills.append(Fill(view.offset + c, token, max_prob.item(c), kind))
    if view.edits is not None:
        for c in found.edited:
            token, prob = view.edits.token.item(row, c), view.edits.max_prob.item(row, c)
            fills.append(Fill(view.offset + c, token, prob, "edited"))
    return fills


def _landscapes(outcome: Outcome, counts: list[int]) -> list[str]:
    """Each row's probabilities at its masks: see Branch.landscape."""
    view, max_prob = outcome.view, outcome.stats.max_prob  # of nothing but masks, row by row
    if view.edits is not None:
        max_prob = view.max_prob[view.masks]
    levels = BytesIO((max_prob * 255 + 0.5).astype(np.uint8).tobytes())
    return [levels.read(count).hex() for count in counts]
