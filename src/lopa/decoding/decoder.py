"""The decoder: a pure state machine that turns statistics into tokens.

`plan()` says what to forward, `advance(stats)` chooses the winner, fills it and spawns the next
branches; `choose` and `record` are its two halves, for whoever is in a hurry. It knows nothing of
models, devices or text, and it is deterministic: the same statistics give the same rounds on every
rank of a group.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from lopa.config import DecodeConfig
from lopa.decoding import lookahead
from lopa.decoding.branch_budget import EVERY_ROUND_THE_SAME, BranchBudget, RoundCost
from lopa.decoding.fill import FillRule
from lopa.decoding.outcome import Outcome
from lopa.decoding.policy import LookaheadPolicy, ScoredPolicy
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
        policy: LookaheadPolicy | None = None,  # None: as configured
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
        self.policy: LookaheadPolicy = policy or ScoredPolicy(config)
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
        self._outcome: Outcome | None = None

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
        selection = self.policy.select(view, drafts) if drafts else None
        winner = 0 if selection is None else selection.winner

        # The winner becomes the anchor, its lookahead token included, and is filled.
        if winner < len(drafts):
            placed = drafts[winner]
            self.tokens[placed.position] = placed.token
            self._masks[(placed.position - self.window.base) // size] -= 1
        found_masks, step = self._masks.copy(), self._block_round
        chosen, forced = self.fill_rule(view.cells(winner, frame), step)
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
            self.drafts = self._spawn(winner, chosen[: frame.blocks[winner] * size], view)
        self._block_round = step + 1 if self._masks[frame.first] else 0
        self._plan = self._frame = None
        if config.early_stop and self.has_eos:
            first = self.first_eos
            if first is not None and self.settled > first:
                self.end("eos")
        # Where blocks are aligned the last may go beyond what was asked for: nobody waits for that.
        enough = self.aligned and self.settled >= config.max_new_tokens
        if config.early_stop and enough and self.finish is None:
            self.end("length")
        self._outcome = Outcome(
            plan=plan,
            frame=frame,
            view=view,
            drafts=drafts,
            has_eos=self._eos_rows,
            selection=selection,
            winner=winner,
            masks=found_masks,
            columns=columns,
            forced=forced.reshape(-1),
            spawned=self.drafts,
            fill_rule=self.fill_rule,
            step=step,
            prompt=self.prompt,
        )
        return winner

    def record(self) -> Round:
        """Of the round that was chosen last."""
        outcome, self._outcome = self._outcome, None
        if outcome is None:
            raise RuntimeError("a record without a round")
        if self.budget is not None:
            self._learn(self.budget, outcome)
        self.policy.observe(outcome)
        plan, frame, view = outcome.plan, outcome.frame, outcome.view
        if outcome.selection is None:
            scores = lookahead.score(view, [], self.config)
        else:
            scores = outcome.selection.scores
        counts = view.masks.sum(axis=1)
        branches = [
            Branch(*row)
            for row in zip(
                [*outcome.drafts, None],
                scores.tolist(),
                counts.tolist(),
                frame.row_ends,
                outcome.has_eos,
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
            winner=outcome.winner,
            fills=self._fills(outcome),
            spawned=outcome.spawned,
            blocks=self.window.block_views(frame, outcome.winner, outcome.masks),
        )

    # -- pieces -------------------------------------------------------------------------------

    def _spawn(self, row: int, filled: BoolArray, view: RoundView) -> list[Lookahead]:
        """Drafts of the next round, from the winner's row. filled: [N], of its own blocks."""
        end = len(filled)
        drafts = self.policy.spawn(view, row, self._free(row, view)[:end] & ~filled)
        if self.budget is None:
            return drafts
        following = self.window.peek_row(self._masks, self.has_eos)
        if not following.length:
            return []
        count = self.budget.choose_branches(
            following.length,
            len(drafts),
            drafts[0].max_prob if drafts else 0.0,
            is_waiting=following.is_waiting,
            # The first forward shows too little to tell.
            is_open=self.round > 1 and not self._eos_in_view(row, end, view),
        )
        return drafts[:count]

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

    def _learn(self, budget: BranchBudget, outcome: Outcome) -> None:
        """Tell the budget what the round would have brought with each number of branches."""
        plan, rivals = outcome.plan, [0]
        if outcome.selection is not None:
            scores = outcome.selection.scores
            lone = lookahead.wins_alone(scores, outcome.drafts, self.config)
            rivals = budget.winners(scores.tolist(), lone)
        rows = sorted({*rivals})
        tokens = dict(zip(rows, outcome.brought(rows), strict=True))
        # The prompt, which the first round has too, is no choice, and may be in the cache already.
        start = max(plan.start, self.window.base) if plan.index == 1 else plan.start
        budget.learn([tokens[row] for row in rivals], int((plan.row_ends - start).sum()))

    def _fills(self, outcome: Outcome) -> list[Fill]:
        kind = self.fill_rule.kind
        view, row, columns = outcome.view, outcome.winner, outcome.columns
        found = (
            columns + view.offset,
            view.token[row, columns],
            view.max_prob[row, columns],
            outcome.forced[columns],
        )
        listed = (x.tolist() for x in found)
        return [Fill(p, t, m, "forced" if f else kind) for p, t, m, f in zip(*listed, strict=True)]


def _landscapes(masks: BoolArray, counts: IntArray, max_prob: FloatArray) -> list[str]:
    """Each row's probabilities at its masks, for the record: see Branch.landscape."""
    levels = (max_prob[masks] * 255 + 0.5).astype(np.uint8).tobytes().hex()
    ends = (2 * counts.cumsum()).tolist()
    return [levels[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]
