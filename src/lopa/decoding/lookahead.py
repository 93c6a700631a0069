"""Lookahead: spawn drafts on the best masks, score each branch by its future, select one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lopa.config import DecodeConfig
from lopa.decoding.fill import passes
from lopa.decoding.round_view import Anchor, RoundView
from lopa.types import BoolArray, Draft, FloatArray, IntArray, Lookahead

Scores = npt.NDArray[np.float64]

NO_MASK_SCORE = 1.0  # of a branch with nothing left to fill
NOBODY: Mapping[int, str] = MappingProxyType({})
OTHER_TOKEN = "anchor predicts another token"


class Selection(NamedTuple):
    """Which row of a round wins."""

    winner: int
    scores: Scores  # [R], higher is better
    refused: Mapping[int, str] = NOBODY  # rows that may not win, and why
    merged: BoolArray | None = None  # [N] what the winner fills on the word of other branches

    @property
    def allowed(self) -> list[float]:
        """The scores, −inf for those that may not win."""
        scores: list[float] = self.scores.tolist()
        for row in self.refused:
            scores[row] = -math.inf
        return scores


def spawn(anchor: Anchor, ranking: FloatArray | None, config: DecodeConfig) -> list[Draft]:
    """The row's tokens at its best-ranked free masks, one a draft; ties go to the lower position.

    ranking: [N] of the row; None: by the configured ranking.
    """
    view, row, free = anchor.view, anchor.row, anchor.free
    token, max_prob = view.token[row], view.max_prob[row]
    if ranking is None:
        ranking = view.ranking[row]
    columns = free.nonzero()[0]
    if config.lookahead_floor > 0:
        columns = columns[max_prob[columns] >= np.float32(config.lookahead_floor)]
    order = (-ranking[columns]).argsort(kind="stable")
    return [
        (Lookahead(view.offset + c, token.item(c), ranking.item(c), max_prob.item(c)),)
        for c in columns[order[: anchor.most]].tolist()
    ]


def score(view: RoundView, drafts: list[Draft], config: DecodeConfig) -> Scores:
    """How promising each branch is: [R], higher is better.

    drafts: of all rows but the last, the anchor.
    """
    if config.score == "fills":
        return _fills(view, drafts, config)
    masks, ranking = view.masks, view.ranking
    counts = np.add.reduce(masks, axis=1, dtype=np.int64)
    if config.score == "mean":
        scores = _lowest_mean(masks, ranking, counts, config.score_fraction)
    elif config.score == "window":
        width = config.score_window
        scores = np.array(
            [_weakest_window(r[m], width) for r, m in zip(ranking, masks, strict=True)]
        )
    else:
        scores = _weakest_block(masks, ranking, view.size)
    scores[counts == 0] = NO_MASK_SCORE
    weight = config.creation_weight
    if weight > 0:
        placed = (min(a.confidence for a in draft) for draft in drafts)
        creation = np.array([*placed, 1.0])  # the anchor places nothing
        scores = weight * creation + (1 - weight) * scores
    return scores


def _fills(view: RoundView, drafts: list[Draft], config: DecodeConfig) -> Scores:
    """Tokens that each branch would bring now, each weighted by its probability, without EOS.

    They all depend on the lookahead token: its own probability to the power of α is a factor.
    """
    passed = passes(view.max_prob, config.threshold) & view.is_text
    counted = np.where(passed, view.max_prob, 0.0)
    *fills, of_anchor = np.add.reduce(counted, axis=1, dtype=np.float64).tolist()
    placed = [d[0].max_prob if len(d) == 1 else min(a.max_prob for a in d) for d in drafts]
    # By Python's power: NumPy's has other last digits where the processor has AVX-512.
    weights = [prob**config.creation_weight for prob in placed]
    # The lookahead token itself counts. But a branch without rivals would nearly always win by it,
    # right or wrong (docs/results.md): if nobody asks whether the anchor agrees, it has to bring
    # more than the anchor without.
    alone = len(drafts) == 1 and config.accept == "score"
    own = [0] if alone else map(len, drafts)
    scores = [weight * (n + f) for weight, n, f in zip(weights, own, fills, strict=True)]
    if alone and scores[0] == of_anchor:  # a tie is the anchor's here
        scores[0] = math.nextafter(of_anchor, -1.0)
    return np.array([*scores, of_anchor])


def wins_alone(scores: Sequence[float], drafts: list[Draft], config: DecodeConfig) -> bool | None:
    """Whether the first of several branches would also win with no rival but the anchor.

    None where that is as the scores say.
    """
    if config.score != "fills" or config.accept != "score" or len(drafts) < 2:
        return None
    return bool(scores[0] - drafts[0][0].max_prob ** config.creation_weight > scores[-1])


def disagreements(view: RoundView, drafts: list[Draft], config: DecodeConfig) -> dict[int, str]:
    """The branches with a token that the anchor, in the same round, no longer predicts; and why.

    When the anchor samples, its sample counts: a position has the same noise in all rows and
    rounds, so an unchanged distribution gives the same token.
    """
    token, max_prob = view.token[-1], view.max_prob[-1]
    open_block = int(view.masks[-1].argmax()) // view.size  # of the first mask
    found = {}
    for row, draft in enumerate(drafts):
        for placed in draft:
            column = placed.position - view.offset
            ahead = column // view.size > open_block
            least = config.agreement_ahead if ahead else config.agreement
            if token.item(column) != placed.token:
                found[row] = OTHER_TOKEN
            elif not max_prob.item(column) > least:
                found[row] = f"anchor at most {least:g}"
    return found


def merge(
    view: RoundView,
    drafts: list[Draft],
    scores: Sequence[float],
    winner: int,
    config: DecodeConfig,
) -> BoolArray | None:
    """[N] what the winner is filled with on the word of other branches that agree with it.

    From the best-scored on, a branch joins if it and each one before it predict each other's
    lookahead token, and it expects no other token where one before it is above the threshold. It
    adds its lookahead token, and its own tokens above the threshold that all before it predict. To
    predict takes a probability above `agreement`.

    scores: [R], −inf: left out. Drafts have one token each.
    """
    if winner == len(drafts):
        return None
    offset, token, max_prob, agreement = view.offset, view.token, view.max_prob, config.agreement

    def predicts(row: int, placed: Lookahead) -> bool:
        at = row, placed.position - offset
        return token.item(at) == placed.token and max_prob.item(at) > agreement

    def fit(row: int, other: int) -> bool:
        return predicts(row, drafts[other][0]) and predicts(other, drafts[row][0])

    may_join = [r for r in range(len(drafts)) if scores[r] > -math.inf and r != winner]
    others = [row for row in may_join if fit(winner, row)]
    if not others:
        return None
    passed = passes(max_prob, config.threshold) & view.is_text
    # Of those that have joined, [N] each: where one is above the threshold, and with which token.
    claimed, claim = passed[winner], token[winner]
    joined: list[int] = []
    for row in sorted(others, key=scores.__getitem__, reverse=True):  # ties stay in their order
        if np.count_nonzero(claimed & view.masks[row] & (token[row] != claim)):
            continue
        if all(fit(row, before) for before in joined):
            joined.append(row)
            claimed, claim = claimed | passed[row], np.where(passed[row], token[row], claim)
    if not joined:
        return None
    same = token == token[winner]  # [R, N]
    predicted = same & (max_prob > agreement)
    common = predicted[winner]  # [N] where all before predict the winner's token
    filled = np.zeros(len(common), np.bool_)
    for row in joined:
        filled |= passed[row] & same[row] & common
        filled[drafts[row][0].position - offset] = True
        common = common & predicted[row]
    return filled


def select(scores: Scores, refused: Mapping[int, str] = NOBODY) -> Selection:
    """The first maximum: ties go to the best-ranked lookahead, last of all to the anchor.

    Where nobody is asked to agree, `score` has seen to it that a branch without rivals has no ties
    by `fills`.
    """
    allowed = Selection(0, scores, refused).allowed
    return Selection(allowed.index(max(allowed)), scores, refused)


def _lowest_mean(masks: BoolArray, ranking: FloatArray, counts: IntArray, share: float) -> Scores:
    means: Scores
    if share >= 1.0:
        sums = np.add.reduce(np.where(masks, ranking, 0.0), axis=1, dtype=np.float64)
        means = sums / np.maximum(counts, 1)
        return means
    ordered = np.sort(np.where(masks, ranking, np.inf).astype(np.float64), axis=1)
    keep = np.maximum((counts * share).astype(np.int64), 1)
    kept = np.arange(masks.shape[1]) < np.minimum(keep, counts)[:, None]
    means = np.where(kept, ordered, 0.0).sum(axis=1) / np.maximum(keep, 1)
    return means


def _weakest_window(values: FloatArray, width: int) -> float:
    """Least mean over `width` masks in a row (over all of them when there are fewer)."""
    if len(values) == 0:
        return NO_MASK_SCORE
    width = min(width, len(values))
    sums = np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])
    return float((sums[width:] - sums[:-width]).min() / width)


def _weakest_block(masks: BoolArray, ranking: FloatArray, size: int) -> Scores:
    """Least mean over a block that still has masks."""
    rows = len(masks)
    cells = masks.reshape(rows, -1, size)
    sums = np.where(cells, ranking.reshape(cells.shape), 0.0).sum(axis=2, dtype=np.float64)
    counts = cells.sum(axis=2)
    means: Scores = np.where(counts > 0, sums / np.maximum(counts, 1), np.inf).min(axis=1)
    return means
