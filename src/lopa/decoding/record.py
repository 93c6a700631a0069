"""The record of a round, for the trace: made from its outcome when there is time."""

from __future__ import annotations

import numpy as np

from lopa.decoding import lookahead
from lopa.decoding.outcome import Outcome
from lopa.decoding.round_view import RoundView
from lopa.types import (
    BlockView,
    BoolArray,
    Branch,
    Draft,
    Fill,
    FloatArray,
    IntArray,
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
    counts = view.masks.sum(axis=1)
    by_row = (
        [list(draft) for draft in (*outcome.drafts, ())],
        scores.tolist(),
        counts.tolist(),
        outcome.frame.row_ends,
        outcome.has_eos,
        _opinions(view, outcome.drafts),
        [refused.get(row, "") for row in range(len(scores))],
        _landscapes(view.masks, counts, view.max_prob),
    )
    return [Branch(*row) for row in zip(*by_row, strict=True)]


def _opinions(view: RoundView, drafts: list[Draft]) -> list[list[Opinion]]:
    """Of each row; nobody asks the anchor about itself."""
    if not drafts:
        return [[]]
    columns = [a.position - view.offset for draft in drafts for a in draft]
    found = view.token[-1, columns].tolist(), view.max_prob[-1, columns].tolist()
    each = (Opinion(*opinion) for opinion in zip(*found, strict=True))
    return [[next(each) for _ in draft] for draft in drafts] + [[]]


def _fills(outcome: Outcome) -> list[Fill]:
    view, row, columns = outcome.view, outcome.winner, outcome.columns
    kinds = np.full(len(columns), outcome.fill_rule.kind, object)
    kinds[outcome.merged[columns]] = "merged"
    kinds[outcome.forced[columns]] = "forced"
    found = columns + view.offset, view.token[row, columns], view.max_prob[row, columns], kinds
    fills = [Fill(*each) for each in zip(*(x.tolist() for x in found), strict=True)]
    if view.edits is not None:
        for column in outcome.edited.tolist():
            token, max_prob = (float(x[row, column]) for x in view.edits[1:])
            fills.append(Fill(view.offset + column, int(token), max_prob, "edited"))
    return fills


def _landscapes(masks: BoolArray, counts: IntArray, max_prob: FloatArray) -> list[str]:
    """Each row's probabilities at its masks: see Branch.landscape."""
    levels = (max_prob[masks] * 255 + 0.5).astype(np.uint8).tobytes().hex()
    ends = (2 * counts.cumsum()).tolist()
    return [levels[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]
