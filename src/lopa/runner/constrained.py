"""Statistics of plans whose answers have to fit an automaton: see `lopa.runner.lattice`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from lopa.config import DecodeConfig
from lopa.runner.class_scores import ScoreColumns
from lopa.runner.fast_lattice import fill_rows
from lopa.types import BoolArray, FloatArray, IntArray, Plan


class RowGroup(NamedTuple):
    """Rows of a plan whose lattices have one length."""

    rows: IntArray  # [R]
    classes: IntArray  # [R, n] from the constraint's start on: of a filled token; -1: a mask


def row_groups(plan: Plan, mask_id: int) -> Iterator[RowGroup]:
    """The rows of which anything is wanted."""
    constraint = plan.constraint
    assert constraint is not None
    is_mask = plan.rows == mask_id
    ends = np.minimum(plan.row_ends, constraint.end)
    asked = (plan.wanted & is_mask).any(axis=1)
    begin = constraint.start - plan.start
    for end in sorted(set(ends[asked].tolist())):
        rows = np.flatnonzero(asked & (ends == end))
        here = slice(begin, end - plan.start)
        classes = constraint.automaton.class_of[plan.rows[rows, here]].astype(np.int64)
        classes[is_mask[rows, here]] = -1
        yield RowGroup(rows, classes)


def constrained_statistics(
    plan: Plan, scores: ScoreColumns, mask_id: int, config: DecodeConfig
) -> tuple[IntArray, FloatArray, FloatArray]:
    """token, max_prob and ranking of what the plan wants.

    scores: on the host, of all that is wanted. A filled token that is wanted (to be edited) stays:
    given the others it may be the only one that fits.
    """
    assert plan.constraint is not None
    row, column = plan.wanted.nonzero()
    token = plan.rows[row, column]
    is_mask: BoolArray = token == mask_id
    max_prob = np.ones(len(token))
    neg_entropy = np.zeros(len(token))
    for rows, classes in row_groups(plan, mask_id):
        here = np.flatnonzero(np.isin(row, rows) & is_mask)
        if len(here) != (classes < 0).sum():
            raise RuntimeError("a mask that has to fit is not wanted")
        found = fill_rows(plan.constraint, classes, scores.at(torch.from_numpy(here)))
        token[here], max_prob[here] = found.token, found.max_prob
        if found.neg_entropy is not None:
            neg_entropy[here] = found.neg_entropy
    return token, max_prob, max_prob if config.ranking == "max_prob" else neg_entropy


def keep_filled(
    plan: Plan, mask_id: int, config: DecodeConfig, found: tuple[IntArray, FloatArray, FloatArray]
) -> None:
    """The same where a device has found what the masks are filled with."""
    token, max_prob, ranking = found
    there = plan.rows[plan.wanted]
    filled = there != mask_id
    token[filled], max_prob[filled] = there[filled], 1.0
    ranking[filled] = float(config.ranking == "max_prob")
