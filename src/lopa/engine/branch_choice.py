"""The branch choice: how many branches each session of a round has, where that is left open.

The sessions of a round are weighed against each other by what they offer (`row_budget`). Where the
host is what takes long, one number for all is weighed now and then and kept: weighing the
candidates of every session takes the host time, too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence, Sized
from typing import NamedTuple

from lopa.decoding.auto_branches import AutoBranches
from lopa.decoding.round_cost import RoundCost
from lopa.decoding.row_budget import NO_OTHERS, AnchorTokens, Offer, Pace, Rest, RowBudget
from lopa.engine.session import Session
from lopa.types import Plan

# Where sessions keep their number of branches: rounds that they have it for. It is weighed again,
# for all of them together, when they have had so many each, in the mean
KEEP_ROUNDS, WEIGH_EVERY = 16, 8


class Kept(NamedTuple):
    """The number of branches that all sessions keep for several rounds."""

    branches: int | None  # None: the device is what takes long, every round is weighed
    rounds: int = 0  # that had been launched when it was weighed, of all sessions
    running: int = 0  # sessions, then


class Choice(NamedTuple):
    """The branches that sessions have of those they offer."""

    offers: Mapping[Session, Offer]
    branches: dict[Session, int]  # at most: some have fewer candidates
    rounds: int = 1  # that they have them for


class _Weighed(NamedTuple):
    """What numbers of branches are weighed by."""

    budget: RowBudget
    offers: list[Offer]
    rest: Rest
    are_kept: bool  # for several rounds
    # Whose pace and anchor tokens count: a session that runs alone goes by its own
    learned: BranchChooser | AutoBranches


class BranchChooser:
    def __init__(
        self,
        forwarded: Callable[[Plan], int],  # tokens
        token_budget: Callable[[], int],  # tokens of a round; ranks are told after the start
        cost: RoundCost | None,  # of a round; None: not known until a session has it
    ) -> None:
        self.cost = cost
        self.pace = Pace()  # of rounds of several sessions
        self.anchor_tokens = AnchorTokens()  # of all sessions that keep their number
        self.rounds = 0  # that were launched: those of each session count
        self.kept: Kept | None = None  # None: nothing was weighed yet
        self._forwarded = forwarded
        self._token_budget = token_budget
        self._budget: RowBudget | None = None  # as soon as a session leaves its number open

    def forget(self) -> None:
        """Those who kept a number have gone."""
        self.kept = None

    def keep(self, running: Collection[Session], new: Sequence[Session]) -> None:
        """Weigh the number that sessions keep where that is due; new ones have it, too.

        Another number counts from the round after the next. running: with the new ones.
        """
        kept = self.kept
        if kept is not None and kept.branches is None:
            return  # all weigh their rounds as they come
        joining = [session for session in new if _may_keep(session)] if new else []
        if kept is None and not joining:
            return
        if kept is not None and not self._is_due(kept, len(running), joins=bool(joining)):
            number = kept.branches
        elif (alone := _only_new(joining, running)) is not None:
            number = self._weigh_first(alone)
        else:
            number = self._weigh_again(running)
        if number is not None:
            for session in joining:
                session.decoder.take(number, KEEP_ROUNDS)

    @property
    def keeps(self) -> bool:
        """Whether sessions keep one number of branches."""
        return self.kept is not None and self.kept.branches is not None

    def learn(self, sessions: Sequence[Session], seconds: float) -> None:
        """Of a round that is recorded. seconds: it was expected to take; 0: not known."""
        if seconds:
            self.pace.add(sum([session.decoder.brought for session in sessions]), seconds)
        tokens, count = 0.0, 0
        for session in sessions:  # on the host's time: no call too many
            decoder = session.decoder
            auto = decoder.auto
            # Of the first round, too: what branches usually add is a mean over whole answers.
            if auto is not None and (gain := auto.last.usual_gain) is not None:
                own, by_anchor = auto.anchor_tokens, decoder.brought - gain
                own.tokens += by_anchor
                own.rounds += 1
                tokens += by_anchor
                count += 1
        if count:
            self.anchor_tokens.add(tokens, count)

    def choose(self, sessions: Sequence[Session], running: Collection[Session]) -> Choice:
        """Of all sessions of a round that leave their number open, in one budget.

        Sessions that have to wait for their turn count too: the rounds that they wait for are like
        this one.
        """
        offers: dict[Session, Offer] = {}
        for session in sessions:  # the device may wait meanwhile: no call too many
            auto = session.decoder.auto
            if auto is not None and auto.offered is not None and auto.is_shared:
                offers[session] = auto.offered
        if not offers:
            return Choice(offers, {})
        number = None if self.kept is None else self.kept.branches
        if number is None:
            weighed = self._weigh(offers, [one for one in sessions if one not in offers], running)
            if not weighed.are_kept:
                self._keep_nothing(running)
                pace = weighed.learned.pace
                chosen = weighed.budget.allocate(weighed.offers, pace, weighed.rest)
                return Choice(offers, dict(zip(offers, chosen, strict=True)))
            number = self._keep(weighed, running)
        return Choice(offers, dict.fromkeys(offers, number), KEEP_ROUNDS)

    def _is_due(self, kept: Kept, running: int, *, joins: bool) -> bool:
        """Whether the number is to be weighed again.

        At once when more than twice as many sessions run as did, or less than half.
        """
        if joins and kept.running == 1:  # one that was alone has its own number
            return True
        if not kept.running <= 2 * running <= 4 * kept.running:
            return True
        return self.rounds - kept.rounds >= WEIGH_EVERY * running  # they may take turns

    def _weigh_again(self, running: Collection[Session]) -> int | None:
        """The number for all from now on; None: none is kept."""
        offers: dict[Session, Offer] = {}
        keeping: list[AutoBranches] = []
        for session in running:
            if (auto := session.decoder.auto) is not None and auto.is_shared:
                offers[session] = auto.offered or auto.usual_offer(session.decoder.row_length)
                if auto.keeps:
                    keeping.append(auto)
        if not offers:
            return None
        weighed = self._weigh(offers, [one for one in running if one not in offers], running)
        if not weighed.are_kept:
            self._keep_nothing(running)
            return None
        number = self._keep(weighed, running)
        for auto in keeping:
            auto.keep(number, KEEP_ROUNDS)
        return number

    def _weigh_first(self, session: Session) -> int | None:
        """The number of the only session, which is new; None: none is kept."""
        auto = session.decoder.auto
        assert auto is not None
        self.cost = auto.cost
        number = self._budget_of(auto.cost).first_kept(auto.usual_offer(session.decoder.row_length))
        if number is None:
            self._keep_nothing((session,))
        else:
            self.kept = Kept(number, self.rounds, 1)
        return number

    def _weigh(
        self, offers: Mapping[Session, Offer], others: Sequence[Session], running: Sized
    ) -> _Weighed:
        """others: sessions of such a round whose number is no choice."""
        anchors = sum([offer.row_length for offer in offers.values()])
        branches: list[int] = []  # of the others
        forwarded, tokens = 0, 0.0
        for session in others:
            plan = session.plan()
            assert plan is not None
            branches.append(len(plan.rows) - 1)
            forwarded += self._forwarded(plan)
            anchors += session.decoder.row_length
            tokens += session.decoder.usual_tokens
        first = next(iter(offers)).decoder.auto
        assert first is not None
        cost = self.cost = first.cost  # one for all: sessions of one model
        budget = self._budget_of(cost)
        rest = NO_OTHERS
        if others:
            rest = Rest(len(others), forwarded, tokens, cost.host_of_all(branches))
        are_kept = budget.are_kept(anchors, len(offers) + len(others))
        learned = first if len(running) == 1 else self
        return _Weighed(budget, list(offers.values()), rest, are_kept, learned)

    def _budget_of(self, cost: RoundCost) -> RowBudget:
        most = self._token_budget()
        if self._budget is None or (self._budget.cost, self._budget.most_tokens) != (cost, most):
            self._budget = RowBudget(cost, most)
        return self._budget

    def _keep(self, weighed: _Weighed, running: Sized) -> int:
        """The number for all sessions, from now on."""
        known = weighed.learned.anchor_tokens
        number = weighed.budget.number_for_all(weighed.offers, known, weighed.rest)
        self.kept = Kept(number, self.rounds, len(running))
        return number

    def _keep_nothing(self, running: Collection[Session]) -> None:
        if self.keeps:
            for session in running:
                if session.decoder.auto is not None:
                    session.decoder.auto.release()
        self.kept = Kept(None)


def _only_new(joining: Sequence[Session], running: Sized) -> Session | None:
    """The only session, if it is new: one that goes on from elsewhere may have made its offer."""
    if len(running) > 1 or not joining:
        return None
    auto = joining[0].decoder.auto
    return joining[0] if auto is not None and auto.offered is None else None


def _may_keep(session: Session) -> bool:
    """Whether a new session leaves its number open, from its first round on."""
    auto = session.decoder.auto
    return auto is not None and auto.is_shared and not auto.known
