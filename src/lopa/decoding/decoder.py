"""The decoder: a pure state machine that turns statistics into tokens.

`plan()` says what to forward, `advance(stats)` chooses the winner, fills it and spawns the next
branches; `choose` and `record` are its two halves, for whoever is in a hurry. It knows nothing of
models, devices or text, and it is deterministic: the same statistics give the same rounds on every
rank of a group.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from lopa.config import DecodeConfig
from lopa.decoding import lookahead
from lopa.decoding.branch_budget import EVERY_ROUND_THE_SAME, BranchBudget, RoundCost
from lopa.decoding.fill import FillRule, above_threshold
from lopa.decoding.round_view import RoundView, eos_mask
from lopa.decoding.windows import Frame, Pipeline, make_window
from lopa.errors import PromptError
from lopa.types import (
    BoolArray,
    Branch,
    Fill,
    FinishReason,
    FloatArray,
    IntArray,
    Lookahead,
    Plan,
    Round,
    Stats,
)


class _Chosen(NamedTuple):
    """What is kept of a round until its record is made."""

    plan: Plan
    frame: Frame
    view: RoundView
    drafts: list[Lookahead]  # what each row but the last had placed
    has_eos: list[bool]  # by row
    scores: lookahead.Scores | None  # by row; None: there was but one
    winner: int
    found_masks: list[int]  # by block, before the fills
    columns: IntArray  # filled
    forced: BoolArray  # by column
    spawned: list[Lookahead]


class Decoder:
    """Decodes one sequence. Call `plan` and `advance` in turn until `plan` returns None."""

    def __init__(
        self,
        config: DecodeConfig,
        prompt_ids: Sequence[int],
        *,
        mask_id: int,
        eos_ids: Collection[int],
        shift: bool,  # the model's raw row p − 1 predicts position p
        aligned: bool = False,  # the model counts blocks from position 0
        cost: RoundCost | None = None,  # of a round, for branches auto; None: all cost the same
    ) -> None:
        if len(prompt_ids) == 0:
            raise PromptError("the prompt is empty: give at least one token")
        if mask_id in prompt_ids:
            raise PromptError("the prompt contains the mask token: take it out")
        self.config = config
        self.mask_id = mask_id
        self.eos_ids = frozenset(eos_ids)
        self.shift = shift
        self.fill_rule = FillRule(config, shift)
        self.prompt = len(prompt_ids)
        self.aligned = aligned
        self.window = make_window(self.prompt, aligned, config)
        length = self.window.base + self.window.count * self.window.size
        self.tokens = np.full(length, mask_id, np.int64)  # the anchor's canvas
        self.tokens[: self.prompt] = prompt_ids
        self.drafts: list[Lookahead] = []
        self.budget: BranchBudget | None = None
        if config.branches == "auto":
            measured = cost if config.objective == "speed" else None
            self.budget = BranchBudget(measured or EVERY_ROUND_THE_SAME)
        self.has_eos = False
        self.round = 0
        self.finish: FinishReason | None = None
        self._block_round = 0  # rounds spent on the present window of blocks
        blocks = self.tokens[self.window.base :].reshape(-1, self.window.size)
        self._masks: list[int] = (blocks == mask_id).sum(axis=1).tolist()  # by block
        self._frame: Frame | None = None
        self._plan: Plan | None = None
        self._chosen: _Chosen | None = None

    # -- what is decoded so far ---------------------------------------------------------------

    @property
    def generated(self) -> IntArray:
        """The new tokens up to the end of the last block that exists; masks where not filled."""
        return self.tokens[self.prompt : self.window.end]

    @property
    def settled(self) -> int:
        """How many new tokens are filled from the left without a gap."""
        gaps = self.tokens[self.prompt :] == self.mask_id
        first = int(gaps.argmax())
        return first if gaps[first] else len(gaps)

    @property
    def first_eos(self) -> int | None:
        """Index among the new tokens of the first EOS token, filled or not to its left."""
        if not self.has_eos:
            return None
        found = eos_mask(self.tokens[self.prompt :], self.eos_ids)
        first = int(found.argmax())
        return first if found[first] else None

    def end(self, reason: FinishReason) -> None:
        """Stop here: `plan` returns None from now on."""
        self.finish = reason
        self._plan = None

    def reuse(self, tokens: int) -> None:
        """Before the first round: so many tokens of the prompt are in the cache already."""
        if not tokens:
            return
        if self.round or not isinstance(self.window, Pipeline) or tokens > self.window.base:
            raise RuntimeError(f"cannot begin behind {tokens} cached tokens")
        self.window.cached = tokens

    # -- the round ----------------------------------------------------------------------------

    def plan(self) -> Plan | None:
        """The next forward; the same one until `advance` has taken its statistics."""
        if self.finish is not None or self._plan is not None:
            return self._plan
        if self.round == self.config.max_rounds:
            self.end("rounds")
            return None
        size, base = self.window.size, self.window.base
        has_eos = [self.has_eos or d.token in self.eos_ids for d in self.drafts] + [self.has_eos]
        blocks = [(d.position - base) // size for d in self.drafts]
        frame = self.window.open(self._masks, blocks, has_eos)
        if frame is None:
            self.end("eos" if self.has_eos else "length")
            return None
        self.round += 1

        end = max(frame.row_ends)
        row_ends = np.array(frame.row_ends)
        rows = self.tokens[None, frame.start : end].repeat(len(has_eos), axis=0)
        for row, draft in enumerate(self.drafts):
            rows[row, draft.position - frame.start] = draft.token
        wanted = rows == self.mask_id
        if min(frame.row_ends) != end:
            wanted &= np.arange(frame.start, end) < row_ends[:, None]
        if self.config.window == "blocks":  # the masks behind the block are only context
            wanted[:, base + (frame.first + 1) * size - frame.start :] = False
        block_ids = None
        if self.config.attention == "block":
            block_ids = (np.arange(frame.start, end) - (0 if self.aligned else base)) // size
            if not self.aligned:
                block_ids[: max(0, base - frame.start)] = -1  # the prompt is one block
        self._frame, self._eos_rows = frame, has_eos
        self._plan = Plan(
            index=self.round,
            start=frame.start,
            cached=frame.cached,
            commit=frame.commit,
            rows=rows,
            row_ends=row_ends,
            wanted=wanted,
            block_ids=block_ids,
        )
        return self._plan

    def advance(self, stats: Stats) -> Round:
        """Take the round's statistics; returns its record, whose winner the runner commits."""
        self.choose(stats)
        return self.record()

    def choose(self, stats: Stats) -> int:
        """Take the round's statistics; returns the winner, which the runner commits.

        The next `plan` is there from now on. `record` can wait until the device has it, as can what
        there is to learn from the round: it counts from the next but one on.
        """
        plan, frame = self._plan, self._frame
        if plan is None or frame is None:
            raise RuntimeError("statistics without a plan")
        config, size, drafts = self.config, self.window.size, self.drafts
        view = RoundView.of(plan, frame, stats, self.window.base, size, self.eos_ids)
        scores, winner = None, 0
        if drafts:
            scores = lookahead.score(view, drafts, config)
            winner = self._select(scores)

        # The winner becomes the anchor, its lookahead token included, and is filled.
        if winner < len(drafts):
            placed = drafts[winner]
            self.tokens[placed.position] = placed.token
            self._masks[(placed.position - self.window.base) // size] -= 1
        found_masks = self._masks.copy()
        chosen, forced = self.fill_rule(view.cells(winner, frame), self._block_round)
        counts = np.add.reduce(chosen, axis=1, dtype=np.int64)
        for block, count in enumerate(counts.tolist(), frame.first):
            self._masks[block] -= count
        chosen = chosen.reshape(-1)
        columns = chosen.nonzero()[0]
        filled = view.token[winner][columns]
        self.tokens[view.offset + columns] = filled
        self.has_eos = self._eos_rows[winner] or not self.eos_ids.isdisjoint(filled.tolist())
        self.window.close(frame, winner, self._masks)
        self.drafts = []
        if config.most_branches:
            self.drafts = self._look_ahead(winner, chosen[: frame.blocks[winner] * size], view)
        self._block_round = self._block_round + 1 if self._masks[frame.first] else 0
        self._plan = self._frame = None
        if config.early_stop and self.has_eos:
            first = self.first_eos
            if first is not None and self.settled > first:
                self.end("eos")
        # Where blocks are aligned the last may go beyond what was asked for: nobody waits for that.
        enough = self.aligned and self.settled >= config.max_new_tokens
        if config.early_stop and enough and self.finish is None:
            self.end("length")
        self._chosen = _Chosen(
            plan=plan,
            frame=frame,
            view=view,
            drafts=drafts,
            has_eos=self._eos_rows,
            scores=scores,
            winner=winner,
            found_masks=found_masks,
            columns=columns,
            forced=forced.reshape(-1),
            spawned=self.drafts,
        )
        return winner

    def record(self) -> Round:
        """Of the round that was chosen last."""
        chosen, self._chosen = self._chosen, None
        if chosen is None:
            raise RuntimeError("a record without a round")
        if self.budget is not None:
            self._learn(self.budget, chosen)
        plan, frame, view = chosen.plan, chosen.frame, chosen.view
        scores = chosen.scores
        if scores is None:
            scores = lookahead.score(view, [], self.config)
        counts = view.masks.sum(axis=1)
        branches = [
            Branch(*row)
            for row in zip(
                [*chosen.drafts, None],
                scores.tolist(),
                counts.tolist(),
                frame.row_ends,
                chosen.has_eos,
                _landscapes(view.masks, counts, view.max_prob),
                strict=True,
            )
        ]
        return Round(
            index=plan.index,
            start=plan.start,
            cached=plan.cached,
            committed=plan.commit,
            branches=branches,
            winner=chosen.winner,
            fills=self._fills(chosen),
            spawned=chosen.spawned,
            blocks=self.window.block_views(frame, chosen.winner, chosen.found_masks),
        )

    # -- pieces -------------------------------------------------------------------------------

    # The two choices that make LoPA; the studies put others in their place.

    def _select(self, scores: lookahead.Scores) -> int:
        return lookahead.select(scores)

    def _ranked(self, ranking: FloatArray) -> FloatArray:
        """What positions to look ahead at are ranked by, the highest first."""
        return ranking

    def _look_ahead(self, row: int, chosen: BoolArray, view: RoundView) -> list[Lookahead]:
        """The branches of the next round, from the winner's row and what was filled of it."""
        end = len(chosen)  # of the row's own blocks
        free = self._free(row, view)[:end] & ~chosen
        max_prob, ranking = view.max_prob[row, :end], self._ranked(view.ranking[row, :end])
        columns = lookahead.candidates(free, max_prob, ranking, self.config)
        if self.budget is not None:
            top_prob = float(max_prob[columns[0]]) if len(columns) else 0.0
            # The first forward shows too little to tell.
            is_open = self.round > 1 and not self._eos_in_view(row, end, view)
            columns = columns[: self._worth(self.budget, len(columns), top_prob, is_open)]
        return lookahead.spawn(columns, row, view, ranking)

    def _free(self, row: int, view: RoundView) -> BoolArray:
        """The masks of a row that a lookahead may be placed on."""
        masks: BoolArray = view.masks[row].copy()
        if self.config.lookahead_eos:
            return masks
        masks &= ~view.is_eos[row]
        if self.has_eos and (end := self.first_eos) is not None:
            masks[max(0, self.prompt + end - view.offset) :] = False
        return masks

    def _eos_in_view(self, row: int, end: int, view: RoundView) -> bool:
        """Whether an EOS token is filled, or the best token of a mask up to there."""
        if self.has_eos:
            return True
        return bool(np.count_nonzero(view.is_eos[row, :end] & view.masks[row, :end]))

    def _worth(self, budget: BranchBudget, candidates: int, top_prob: float, is_open: bool) -> int:
        """How many of the candidates the next round is to try; see `choose_branches`."""
        row = self.window.peek_row(self._masks, self.has_eos)
        if not row.length:
            return 0
        return budget.choose_branches(
            row.length, candidates, top_prob, is_waiting=row.is_waiting, is_open=is_open
        )

    def _learn(self, budget: BranchBudget, chosen: _Chosen) -> None:
        """Tell the budget what the round would have brought with each number of branches."""
        rivals = [0]
        if chosen.scores is not None:
            lone = lookahead.wins_alone(chosen.scores, chosen.drafts, self.config)
            rivals = budget.winners(chosen.scores.tolist(), lone)
        rows = sorted({*rivals})
        tokens = dict(zip(rows, self._brought(rows, chosen), strict=True))
        # The prompt, which the first round has too, is no choice, and may be in the cache already.
        start = chosen.plan.start
        begin = max(start, self.window.base) if chosen.plan.index == 1 else start
        forwarded = int((chosen.plan.row_ends - begin).sum())
        budget.learn([tokens[row] for row in rivals], forwarded)

    def _brought(self, rows: list[int], chosen: _Chosen) -> list[int]:
        """Tokens that each row would bring as the winner, less those behind an EOS token."""
        view, plan, frame = chosen.view, chosen.plan, chosen.frame
        if self.config.window == "pipeline":  # every row at once
            filled = above_threshold(view.cells(rows, frame), self.config.threshold)
            passed = (filled.chosen & ~filled.forced).reshape(len(rows), -1)
            forced = filled.forced.sum(axis=(1, 2))
        else:
            fills = [self.fill_rule(view.cells(row, frame), self._block_round) for row in rows]
            passed = np.stack([filled.chosen.ravel() for filled in fills])
            forced = np.zeros(len(rows), np.int64)
        over = passed & view.is_eos[rows]
        if any(chosen.has_eos):  # some are there already; those of a prompt are none
            columns = np.arange(view.offset, view.offset + passed.shape[1])
            there = plan.rows[rows][:, columns - plan.start]
            over |= eos_mask(there, self.eos_ids) & (columns >= self.prompt)
        if over.any():
            passed = passed & (np.cumsum(over, axis=1) - over == 0)
        found = (passed.sum(axis=1) + forced).tolist()
        lookaheads = len(chosen.drafts)
        return [count + (row < lookaheads) for row, count in zip(rows, found, strict=True)]

    def _fills(self, chosen: _Chosen) -> list[Fill]:
        kind = self.fill_rule.kind
        view, row, columns = chosen.view, chosen.winner, chosen.columns
        found = (
            columns + view.offset,
            view.token[row, columns],
            view.max_prob[row, columns],
            chosen.forced[columns],
        )
        listed = (x.tolist() for x in found)
        return [Fill(p, t, m, "forced" if f else kind) for p, t, m, f in zip(*listed, strict=True)]


def _landscapes(masks: BoolArray, counts: IntArray, max_prob: FloatArray) -> list[str]:
    """Each row's probabilities at its masks, for the record: see Branch.landscape."""
    levels = (max_prob[masks] * 255 + 0.5).astype(np.uint8).tobytes().hex()
    ends = (2 * counts.cumsum()).tolist()
    return [levels[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]
