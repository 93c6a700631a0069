"""A sequence's own part in `branches="auto"`: offers, the number it is told, what it learns.

Who runs the sequences weighs the offers of a round (`row_budget`) and tells each its number, for
that round or for several. A number that is kept for several rounds counts before their candidates
are known: those rounds offer nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from lopa.config import DecodeConfig
from lopa.decoding import branch_budget
from lopa.decoding.branch_budget import BranchBudget
from lopa.decoding.outcome import Outcome
from lopa.decoding.round_cost import EVERY_ROUND_THE_SAME, RoundCost
from lopa.decoding.row_budget import NO_STEPS, AnchorTokens, Offer, Pace, RowBudget, Steps
from lopa.decoding.windows import RowPeek
from lopa.types import Draft, Round


class AutoBranches:
    def __init__(self, config: DecodeConfig, cost: RoundCost, prompt: int) -> None:
        """prompt: its tokens."""
        self.budget = BranchBudget(config.accept)
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
        self._most = config.most_branches
        self._prompt = prompt
        self._taken = NO_STEPS  # by which the next round's number was chosen
        self._number, self._rounds = 0, 0  # branches, of so many rounds behind the next
        self._last = NO_STEPS, False  # `_taken` and `is_kept` of the round that was chosen last
        self._expected: tuple[Steps, list[Draft]] = NO_STEPS, []  # what was taken, its branches
        # Where it keeps its number: tokens that its branches usually add to a round; what the last
        # round brought, less that; and all such rounds, how many they are
        self._kept_gain: float | None = None
        self.brought_by_anchor: float | None = None
        self._sum_by_anchor, self._kept_rounds = 0.0, 0
        self._pace = Pace()
        self._unpaced: list[tuple[int, Round]] = []  # that are not in it, with what they brought

    # -- for who weighs the offers --------------------------------------------------------------

    def usual_offer(self, row_length: int) -> Offer:
        """What a usual round expects of branches, whatever the candidates of the next one are."""
        return self.budget.usual_offer(row_length, is_open=self.is_open)

    def take(self, branches: int, rounds: int, *, is_kept: bool) -> None:
        """Have so many branches in the next round and in those behind it. See `Decoder.take`."""
        self._kept_gain = None
        if is_kept:
            self._keep(branches)
        elif self.offered is not None:
            self._taken = self.offered.steps
        self.offered = None
        self._number, self._rounds = branches, rounds - 1

    @property
    def keeps(self) -> bool:
        """Whether the round after the next has a number by now."""
        return self._rounds > 0

    def keep(self, branches: int, rounds: int) -> None:
        """Have so many branches in so many rounds, from the one after the next on."""
        self._number, self._rounds = branches, rounds
        self._keep(branches)

    def release(self) -> None:
        """Keep the number no longer: the round after the next offers its branches again."""
        self._rounds = 0

    @property
    def pace(self) -> Pace:
        """Of the sequence's rounds, as if it were alone."""
        for brought, one in self._unpaced:
            start = max(one.start, self._prompt)  # what is cached of a prompt is no matter
            tokens = sum(branch.end - start for branch in one.branches)
            self._pace.add(brought, self.cost.of_one(tokens, len(one.branches) - 1))
        self._unpaced.clear()
        return self._pace

    @property
    def anchor_tokens(self) -> AnchorTokens:
        """Of the sequence's own rounds, which are few: all count the same."""
        return AnchorTokens(self._sum_by_anchor, self._kept_rounds)

    @property
    def expected_gain(self) -> float:
        """Tokens that the branches of the last round that was recorded were expected to add."""
        steps, drafts = self._expected
        return steps.gain_of(len(drafts))

    def _keep(self, branches: int) -> None:
        self._taken = self.budget.usual_steps
        self._kept_gain = self._taken.gain_of(branches)

    # -- for the decoder ------------------------------------------------------------------------

    def weigh_alone(self) -> int:
        """The number for the next round, of those offered, as if no other session ran."""
        assert self.offered is not None
        (number,) = RowBudget(self.cost).allocate([self.offered], self.pace)
        return number

    def next_round(self) -> int:
        """Go on to the next round; returns how many candidates it wants."""
        self._last = self._taken, self.is_kept
        self.is_kept = self._rounds > 0
        if self.is_kept:
            self._rounds -= 1
            return self._number
        self._taken = NO_STEPS
        return self._most

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
        taken, is_kept = self._last
        # Not of every round: it takes the host as long as choosing does.
        every = branch_budget.LEARN_EVERY_KEPT if is_kept else branch_budget.LEARN_EVERY
        if not record.index % every:
            self.budget.observe(outcome)
        self._expected = taken, outcome.drafts
        self._unpaced.append((brought, record))
        if self._kept_gain is None:
            self.brought_by_anchor = None
        else:
            # Of the first round, too: what branches usually add is a mean over whole answers.
            self.brought_by_anchor = brought - self._kept_gain
            self._sum_by_anchor += self.brought_by_anchor
            self._kept_rounds += 1
