"""The decoder: a pure state machine that turns statistics into tokens.

`plan` says what to forward, `choose` takes its statistics, fills the winner and spawns the next
drafts, and `record`, which can wait, tells what became of it. The decoder knows nothing of models,
devices or text, and it is deterministic: the same statistics give the same rounds on every rank.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np

from lopa.config import DecodeConfig
from lopa.decoding.answer_state import AnswerState
from lopa.decoding.auto_branches import AutoBranches
from lopa.decoding.branch_budget import PRIOR_TOKENS
from lopa.decoding.fill import FillRule, with_others
from lopa.decoding.length_search import LengthSearch, canvas_of
from lopa.decoding.outcome import Fills, Outcome
from lopa.decoding.policy import LookaheadPolicy, make_policy
from lopa.decoding.record import make_record
from lopa.decoding.round_cost import EVERY_ROUND_THE_SAME, RoundCost
from lopa.decoding.round_view import Anchor, RoundView, eos_mask
from lopa.decoding.row_budget import PRIOR_ROUNDS
from lopa.decoding.windows import Frame, Pipeline, layout_behind, layout_of_gaps, make_window
from lopa.types import (
    Automaton,
    BoolArray,
    Draft,
    FinishReason,
    Gap,
    IntArray,
    Plan,
    Round,
    Stats,
)


class Decoder:
    """Decodes one sequence: `plan`, `choose` and `record` in turn until `plan` returns None."""

    def __init__(
        self,
        config: DecodeConfig,
        prompt_ids: Sequence[int],  # at least one, and none is the mask
        *,
        mask_id: int,
        eos_ids: Collection[int],
        shift: bool,  # the model's raw row p − 1 predicts position p
        aligned: bool = False,  # the model counts blocks from position 0
        cost: RoundCost = EVERY_ROUND_THE_SAME,  # for branches auto with objective speed
        policy: LookaheadPolicy | None = None,  # None: as configured
        automaton: Automaton | None = None,  # what the answer has to fit
        gaps: Sequence[Gap] = (),  # behind the prompt, each with the text behind it
    ) -> None:
        self.config = config
        self.mask_id = mask_id
        # In a gap there is no EOS: it is filled wholly, and the text behind it goes on.
        self.eos_ids = frozenset(() if gaps else eos_ids)
        self.never = tuple(sorted(eos_ids)) if gaps else ()
        self.fill_rule = FillRule(config, shift)
        self.policy: LookaheadPolicy = policy or make_policy(config)
        self.prompt = len(prompt_ids)
        self.aligned = aligned
        self.gaps = tuple(gaps)
        self.search: LengthSearch | None = None  # for the length of a gap, while it is not known
        if any(len(gap.lengths) > 1 for gap in gaps):
            self.search = LengthSearch(prompt_ids, self.gaps, mask_id, self.never, config)
            self.gaps = self.search.longest
        self._lay_out(prompt_ids)
        self.answer: AnswerState | None = None
        if automaton is not None:
            self.answer = AnswerState(automaton, config, self.prompt)
        self.drafts: list[Draft] = []
        self.auto: AutoBranches | None = None  # the number of branches is a choice
        if config.branches == "auto":
            self.auto = AutoBranches(config, cost, self.prompt)
        # Tokens, by the last round that was recorded; negative where its EOS cuts earlier ones off
        self.brought = 0
        self._counted = 0  # `filled` after that round
        self.has_eos = False
        self.round = 0
        self.finish: FinishReason | None = None
        self._block_round = 0  # rounds spent on the present window of blocks
        self._edit_round = 0  # rounds that the first block has had since its last mask
        self._frame: Frame | None = None
        self._plan: Plan | None = None
        self._outcome: Outcome | None = None
        self._length_round: Round | None = None  # of the search, not yet recorded

    def _lay_out(self, prompt_ids: Sequence[int]) -> None:
        """The anchor's canvas, and the window on it."""
        config, mask_id = self.config, self.mask_id
        canvas = canvas_of(self.gaps, mask_id)
        if self.gaps:
            behind = len(self.gaps[-1].after)
            region = len(canvas) - behind  # from the first gap to the last
            layout = layout_of_gaps(self.prompt, region, behind, config)
            self.new_end: int | None = self.prompt + region
        else:
            layout = layout_behind(self.prompt, self.aligned, config)
            canvas = [mask_id] * (layout.end - self.prompt)
            self.new_end = None
        self.window = make_window(layout, config)
        self.tokens = np.array([*prompt_ids, *canvas], np.int64)
        cells = self.tokens[layout.base : layout.base + layout.count * layout.size]
        blocks = cells.reshape(-1, layout.size) == mask_id
        self._masks: list[int] = blocks.sum(axis=1).tolist()  # by block
        self._all_masks: int = sum(self._masks)
        # By block, what is left to do: masks, or with editing 1 where tokens may still change.
        self._open = self._masks.copy() if config.edits else self._masks
        self._pinned = self.tokens != mask_id

    # -- what is decoded so far ---------------------------------------------------------------

    @property
    def generated(self) -> IntArray:
        """The new tokens up to the end of the last block that exists; masks where not filled.

        With gaps: from the first to the last, with the text between them.
        """
        return self.tokens[self.prompt : self.new_end or self.window.end]

    @property
    def limit(self) -> int | None:
        """How many new tokens the answer may have; None: whole blocks."""
        if self.new_end is not None:
            return self.new_end - self.prompt
        return self.config.max_new_tokens if self.config.cuts_answer else None

    @property
    def settled(self) -> int:
        """How many new tokens are final from the left without a gap."""
        gaps = self.tokens[self.prompt :] == self.mask_id
        first = int(gaps.argmax())
        filled = first if gaps[first] else len(gaps)
        if self.config.edits:  # only those of finished blocks will not change
            return min(filled, max(0, self.window.settled - self.prompt))
        return filled

    @property
    def filled(self) -> int:
        """How many tokens of the answer are filled so far: those behind an EOS do not count."""
        first = self.first_eos
        if first is None:
            return self._all_masks - sum(self._masks)
        return int(np.count_nonzero(self.generated[: first + 1] != self.mask_id))

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
        if reason == "length" and self.answer is not None:
            reason = "eos"  # one that has to fit is complete when all of it is filled
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

    def take(self, branches: int, rounds: int = 1) -> None:
        """Have so many branches, of those there are, in the next so many rounds.

        The rounds behind the first one offer none, nor does the first if it is told before.
        """
        self.drafts = self.drafts[:branches]
        if self.auto is not None:
            self.auto.take(branches, rounds)

    @property
    def row_length(self) -> int:
        """Tokens of a row of the next round, without the prompt that its first round forwards."""
        plan = self.plan()
        assert plan is not None
        length: int = plan.rows.shape[1]
        return length - max(0, self.prompt - plan.start)

    @property
    def usual_tokens(self) -> float:
        """What a round brings, as far as can be told."""
        return (self.filled + PRIOR_ROUNDS * PRIOR_TOKENS) / (self.round + PRIOR_ROUNDS)

    def plan(self) -> Plan | None:
        """The next forward; the same one until `choose` has taken its statistics.

        Branches that were offered and not taken by then are weighed as if no other session ran.
        """
        if self.finish is not None or self._plan is not None:
            return self._plan
        if self.search is not None:
            self.round += 1
            self._plan = self.search.plan(self.round)
            return self._plan
        if self.auto is not None and self.auto.offered is not None:
            self.take(self.auto.weigh_alone())
        size, base = self.window.size, self.window.base
        has_eos = [self.has_eos] * (len(self.drafts) + 1)
        blocks: list[list[int]] = [[] for _ in self.drafts]
        for row, draft in enumerate(self.drafts):
            for ahead in draft:
                has_eos[row] |= ahead.token in self.eos_ids
                blocks[row].append((ahead.position - base) // size)
        frame = self.window.open(self._open, blocks, self._ends(has_eos))
        assert frame is not None  # else `choose` has ended it
        self.round += 1

        end = max(frame.row_ends)
        row_ends = np.array(frame.row_ends)
        rows = np.empty((len(has_eos), end - frame.start), np.int64)
        rows[:] = self.tokens[frame.start : end]
        for row, draft in enumerate(self.drafts):
            for ahead in draft:
                rows[row, ahead.position - frame.start] = ahead.token
        wanted = rows == self.mask_id
        if self.config.edits:
            changeable = ~self._pinned[frame.start : end]
            changeable[: max(0, base + frame.first * size - frame.start)] = False
            wanted[:] = changeable
        for row, row_end in enumerate(frame.row_ends):
            if row_end < end:
                wanted[row, row_end - frame.start :] = False
        if self.config.window == "blocks":  # the masks behind the block are only context
            wanted[:, base + (frame.first + 1) * size - frame.start :] = False
        block_ids = None
        if self.config.attention == "block":
            block_ids = (np.arange(frame.start, end) - (0 if self.aligned else base)) // size
            if not self.aligned:
                block_ids[: max(0, base - frame.start)] = -1  # the prompt is one block
        constraint = None
        if self.answer is not None:
            self.answer.read(self.tokens, self.mask_id)
            blocks_end = base + (frame.first + 1) * size
            last = blocks_end if self.config.window == "blocks" else end
            constraint = self.answer.constraint(last)
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
            constraint=constraint,
            never=self.never,
        )
        return self._plan

    def choose(self, stats: Stats) -> int:
        """Take the round's statistics; returns the winner, which the runner commits.

        The next `plan` is there from now on; `record` can wait until the device has it. What is
        learned is learned in `record`, when the next drafts are spawned: it acts on those behind
        them.
        """
        plan, frame = self._plan, self._frame
        if plan is not None and self.search is not None:
            return self._choose_length(plan, stats)
        if plan is None or frame is None:
            raise RuntimeError("statistics without a plan")
        drafts, auto = self.drafts, self.auto
        base, size, mask_id = self.window.base, self.window.size, None
        if self.config.edits:
            mask_id = self.mask_id
        view = RoundView.of(plan, frame, stats, base, size, self.eos_ids, mask_id)
        selection = self.policy.select(view, drafts) if drafts else None
        winner = 0 if selection is None else selection.winner
        if winner < len(drafts):  # it becomes the anchor, its lookahead tokens included
            self._place(drafts[winner])
        fills = self._fill(view, frame, winner, None if selection is None else selection.merged)
        chain = [winner]
        if self.config.accept == "exact" and drafts:
            while (row := self._reached(plan, frame)) is not None:
                # What the round commits is committed by now.
                fills = self._fill(view, replace(frame, commit=0), row)
                chain.append(row)
            winner = chain[-1]
        self._plan = self._frame = None
        following = self.window.peek_row(self._open, self._ends([self.has_eos])[0])
        if self.finish is None:
            if self.round == self.config.max_rounds:
                self.end("rounds")
            elif not following.length:
                self.end("filled" if self.gaps else "eos" if self.has_eos else "length")
        self.drafts = []
        if most := self.config.most_branches if auto is None else auto.next_round():
            own = fills.chosen[: frame.blocks[winner] * view.size]  # of the row's own blocks
            self.drafts = self._spawn(view, drafts, winner, own, frame.may_force[winner], most)
        if auto is not None and not auto.is_kept:
            auto.is_open = self._sees_no_eos(view, winner)
            if self.drafts and self.finish is None:
                auto.make_offer(following, self.drafts, self.round + 1)
        self._outcome = Outcome(
            plan=plan,
            frame=frame,
            stats=stats,
            view=view,
            drafts=drafts,
            has_eos=self._eos_rows,
            selection=selection,
            winner=winner,
            chain=chain,
            fills=fills,
            spawned=self.drafts,
            fill_rule=self.fill_rule,
            prompt=self.prompt,
        )
        if auto is not None and auto.offered is not None and self.round < len(auto.known):
            self.take(auto.known[self.round])
        return winner

    def record(self) -> Round:
        """Of the round that was chosen last."""
        if self._length_round is not None:
            record, self._length_round = self._length_round, None
            self.brought = 0
            return record
        outcome, self._outcome = self._outcome, None
        if outcome is None:
            raise RuntimeError("a record without a round")
        counted, self._counted = self._counted, self.filled
        self.brought = self._counted - counted
        self.policy.observe(outcome)
        blocks = self.window.block_views(outcome.frame, outcome.winner, outcome.fills.masks)
        record = make_record(outcome, blocks)
        if self.auto is not None:
            self.auto.learn(outcome, record, self.brought)
        return record

    def _sees_no_eos(self, view: RoundView, winner: int) -> bool:
        """The first forward shows too little to tell."""
        if self.round == 1 or self.gaps or self.has_eos:
            return False
        return self.eos_ids.isdisjoint(view.token[winner].tolist())

    def _choose_length(self, plan: Plan, stats: Stats) -> int:
        """A round of the search: when it is over, decoding begins with the length it has chosen."""
        assert self.search is not None
        self._length_round, self._plan = self.search.choose(plan, stats), None
        if self.search.found is not None:
            self.gaps, self.search = self.search.found, None
            self._lay_out(self.tokens[: self.prompt].tolist())
        if self.round == self.config.max_rounds:
            self.end("rounds")
        return 0  # the first round's only row; the others commit nothing

    def _place(self, draft: Draft) -> None:
        for placed in draft:
            self.tokens[placed.position] = placed.token
            self._masks[(placed.position - self.window.base) // self.window.size] -= 1

    def _fill(
        self, view: RoundView, frame: Frame, row: int, merged: BoolArray | None = None
    ) -> Fills:
        """Fill the anchor, which is that row by now, and close the window.

        merged: [N] what it is filled with beside what its own rule says.
        """
        masks, step = self._masks.copy(), self._block_round
        filled = self.fill_rule(view.cells(row, frame), step)
        added: list[int] = []
        if merged is not None:
            passed = filled.chosen & ~filled.forced
            others = merged & view.masks[row] & ~passed.reshape(-1)
            filled, added = with_others(filled, others), others.nonzero()[0].tolist()
        chosen, forced, edited = filled.chosen.reshape(-1), filled.forced.reshape(-1), filled.edited
        at = chosen.nonzero()[0]
        found = view.token[row][at]
        self.tokens[view.offset :][at] = found
        columns, tokens = at.tolist(), found.tolist()
        for column in columns:
            self._masks[frame.first + column // view.size] -= 1
        self.has_eos = self._eos_rows[row] or not self.eos_ids.isdisjoint(tokens)
        replaced: list[int] = []
        if edited is not None:
            replaced = self._edit(view, frame, row, edited, masks)
        self.window.close(frame, row, self._open)
        self._block_round = step + 1 if self._masks[frame.first] else 0
        if self.config.early_stop:
            first = self.first_eos
            if first is not None and self.settled > first:
                self.end("eos")
            # Tokens past max_new_tokens, in aligned blocks, are not needed.
            elif self.aligned and self.settled >= self.config.max_new_tokens:
                self.end("length")
        by_force = forced.nonzero()[0].tolist()
        return Fills(masks, step, chosen, columns, tokens, by_force, added, replaced)

    def _edit(
        self, view: RoundView, frame: Frame, row: int, edited: BoolArray, masks: list[int]
    ) -> list[int]:
        """Replace tokens, and find the blocks that are finished by that; returns the columns.

        A block is finished by a round that found it without masks and left it as it was, or by the
        last round that it may have. One behind it is finished with it if it, too, was left as it
        was. masks: [blocks] before the fills.
        """
        assert view.edits is not None
        columns = edited.reshape(-1).nonzero()[0]
        self.tokens[view.offset :][columns] = view.edits.token[row][columns]
        self.has_eos = bool(eos_mask(self.tokens[self.prompt :], self.eos_ids).any())
        changed: list[bool] = np.logical_or.reduce(edited, axis=1).tolist()
        first, last = frame.first, frame.first + frame.blocks[row]
        for block in range(first, last):
            self._open[block] = max(1, self._masks[block])
        for block in range(first, last):
            if self._masks[block]:
                break
            unchanged = not masks[block] and not changed[block - first]
            spent = False
            if block == first:
                self._edit_round += not masks[block]
                spent = self._edit_round >= self.config.edit_rounds
            if not unchanged and not spent:
                break
            self._open[block] = self._edit_round = 0
            if not unchanged:
                break
        replaced: list[int] = columns.tolist()
        return replaced

    def _ends(self, has_eos: list[bool]) -> list[bool]:
        """[R] rows behind which no block is appended. Where tokens may change, parity goes on."""
        if self.config.edits and not self.config.early_stop:
            return [False] * len(has_eos)
        return has_eos

    def _reached(self, plan: Plan, frame: Frame) -> int | None:
        """The row of this round that is the very one a decoder without branches forwards next."""
        following = self.window.open(self._open, [], self._ends([self.has_eos]))
        if following is None or self.finish is not None or following.fresh != frame.fresh:
            return None
        # Under full attention keys and values depend on what lay to their right when they were
        # committed: the next forward must find the same cache, and commit the same.
        same = (following.start, following.cached, following.commit)
        if self.config.attention == "full" and same != (plan.start, plan.cached, plan.commit):
            return None
        end, last = following.row_ends[0], following.first + following.blocks[0]
        ahead = self.tokens[plan.start : end].tobytes()
        span = slice(following.first - frame.first, last - frame.first)
        for row in range(len(plan.rows) - 1):
            if (
                frame.row_ends[row] == end
                and frame.first + frame.blocks[row] == last
                and plan.rows[row, : end - plan.start].tobytes() == ahead
                and np.array_equal(frame.may_force[row, span], following.may_force[0])
            ):
                return row
        return None

    def _spawn(
        self,
        view: RoundView,
        drafts: list[Draft],
        row: int,
        filled: BoolArray,
        may_force: BoolArray,
        most: int,
    ) -> list[Draft]:
        """Up to `most` drafts of the next round, from the winner's row.

        filled: [N], of its own blocks.
        """
        count = len(filled)
        masks = view.masks if self.config.lookahead_eos else view.is_text
        free = masks[row, :count] & ~filled
        if not self.config.lookahead_eos and (first := self.first_eos) is not None:
            free[max(0, self.prompt + first - view.offset) :] = False  # nor behind it
        tokens = self.tokens[view.offset : view.offset + count]
        fits = self.answer is not None
        spawned = self.policy.spawn(
            Anchor(view, drafts, row, free, filled, tokens, may_force, fits, most)
        )[:most]
        if fits:  # a branch has to, too: whatever a policy says, its draft is of the row's path
            own = view.token[row]
            return [d for d in spawned if all(own[a.position - view.offset] == a.token for a in d)]
        return spawned
