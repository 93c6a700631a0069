"""A sequence's own part in `branches="auto"`: offers, the number it is told, what it learns.

Who runs the sequences weighs the offers of a round (`row_budget`) and tells each its number, for
that round or for several. A number that is kept for several rounds counts before their candidates
are known: those rounds offer nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lopa.config import DecodeConfig
from lopa.decoding import branch_budget
from lopa.decoding.branch_budget import BranchBudget
from lopa.decoding.outcome import Outcome
from lopa.decoding.round_cost import EVERY_ROUND_THE_SAME, RoundCost
from lopa.decoding.row_budget import NO_STEPS, AnchorTokens, Offer, Pace, RowBudget, Steps
from lopa.decoding.windows import RowPeek
from lopa.types import Draft, Round


class Number(NamedTuple):
    """How many branches a round may have, and what they were chosen by."""

    branches: int
    steps: Steps
    usual_gain: float | None  # tokens that they usually add; None: the number is not kept


def usual_row(config: DecodeConfig) -> int:
    """Tokens that most rows have at least: two blocks, where the first rounds have one."""
    if config.window != "pipeline" or config.append_at >= 1.0:
        return 0
    return min(2, config.blocks) * config.block_size


class AutoBranches:
    def __init__(self, config: DecodeConfig, cost: RoundCost, prompt: int) -> None:
        """prompt: its tokens."""
        self.budget = BranchBudget(config.accept, usual_row(config))
        # By tokens per second all sessions are weighed together; by tokens per forward each alone.
        self.is_shared = config.objective == "speed"
        self.cost = cost if self.is_shared else EVERY_ROUND_THE_SAME
        self.known: Sequence[int] = ()  # of the first rounds of an answer that is decoded again
        # What the candidates of the next round are worth, until a number of them is taken. None:
        # how many it has is no choice.
        self.offered: Offer | None = None
        # No EOS is in view, neither filled nor predicted; not looked for where a number is kept
        self.is_open = False
        self.is_kept = False  # the next round's number was told before its candidates were known
        self._prompt = prompt
        # Of a round that offers all of its candidates
        self._open = Number(config.most_branches, NO_STEPS, None)
        # Of the round that was chosen last, of the next one, and of the rounds behind that
        self.last = self._next = self._kept = self._open
        self._rounds = 0  # how many have the last of these
        self._expected: tuple[Steps, int] = NO_STEPS, 0  # of the last recorded round, its branches
        # Of its own rounds with a number that was kept, which are few: all count the same
        self.anchor_tokens = AnchorTokens()
        self._pace = Pace()
        self._unpaced: list[tuple[int, Round]] = []  # that are not in it, with what they brought

    # -- for who weighs the offers --------------------------------------------------------------

    def usual_offer(self, row_length: int) -> Offer:
        """What a usual round expects of branches, whatever the candidates of the next one are."""
        return self.budget.usual_offer(row_length, is_open=self.is_open)

    def take(self, branches: int, rounds: int) -> None:
        """Have so many branches in the next round and in those behind it. See `Decoder.take`."""
        if rounds > 1:
            self.keep(branches, rounds - 1)
            self._next = self._kept
        else:
            self._rounds = 0
            steps = self._next.steps if self.offered is None else self.offered.steps
            self._next = Number(branches, steps, None)
        self.offered = None

    @property
    def keeps(self) -> bool:
        """Whether the round after the next has a number by now."""
        return self._rounds > 0

    def keep(self, branches: int, rounds: int) -> None:
        """Have so many branches in so many rounds, from the one after the next on."""
        steps = self.budget.usual_steps
        self._kept, self._rounds = Number(branches, steps, steps.gain_of(branches)), rounds

    def release(self) -> None:
        """Keep the number no longer: the round after the next offers its branches again."""
        self._rounds = 0

    @property
    def pace(self) -> Pace:
        """Of the sequence's rounds that kept no number, as if it were alone."""
        for brought, one in self._unpaced:
            start = max(one.start, self._prompt)  # what is cached of a prompt is no matter
            tokens = sum(branch.end - start for branch in one.branches)
            self._pace.add(brought, self.cost.of_one(tokens, len(one.branches) - 1))
        self._unpaced.clear()
        return self._pace

    @property
    def expected_gain(self) -> float:
        """Tokens that the branches of the last round that was recorded were expected to add."""
        steps, branches = self._expected
        return steps.gain_of(branches)

    # -- for the decoder ------------------------------------------------------------------------

    def weigh_alone(self) -> int:
        """The number for the next round, of those offered, as if no other session ran."""
        assert self.offered is not None
        (number,) = RowBudget(self.cost).allocate([self.offered], self.pace)
        return number

    def next_round(self) -> int:
        """Go on to the next round; returns how many candidates it wants."""
        self.last = self._next
        if self._rounds:
            self._rounds -= 1
            number = self._next = self._kept
            self.is_kept = True
        else:
            number = self._next = self._open
            self.is_kept = False
        return number.branches

    def make_offer(self, row: RowPeek, drafts: Sequence[Draft], index: int) -> None:
        """Of the next round. index: its number."""
        self.offered = self.budget.offer(
            row.length,
            len(drafts),
            drafts[0][0].max_prob,
            index=index,
            is_waiting=row.is_waiting,
            is_open=self.is_open,
        )

    def learn(self, outcome: Outcome, record: Round, brought: int) -> None:
        """Of the round that was chosen last; brought: its tokens."""
        self._expected = self.last.steps, len(outcome.drafts)
        # Not of every round: it takes the host as long as choosing does. What rounds with a kept
        # number brought is learned by the branch choice, of all sessions at once.
        if self.last.usual_gain is not None:
            if not record.index % branch_budget.LEARN_EVERY_KEPT:
                self.budget.observe(outcome)
            return
        self._unpaced.append((brought, record))
        if not record.index % branch_budget.LEARN_EVERY:
            self.budget.observe(outcome)
