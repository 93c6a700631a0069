"""The scheduler: many sessions on one runner, a round of all of them in one forward.

Sessions are admitted in their order as soon as the KV cache can hold them (continuous batching). A
round takes as many running sessions as its token budget allows, in turn; one that could not go this
time goes first the next time. How many branches its sessions have is the choice of `branch_choice`.

A round in flight is one object, `InFlightRound`. Where the runner is asynchronous the next round
is launched as soon as the last one is committed: the device works while records are made, text is
detokenized and whoever drives the engine reads the events. With many sessions the host's own part
would keep the device waiting: then they go in two halves, and while one is on the host the other is
on the device.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from lopa.decoding.round_cost import RoundCost
from lopa.engine.base import MAX_RUNNING, TOKEN_BUDGET, Engine
from lopa.engine.branch_choice import BranchChooser
from lopa.engine.engine_lock import EngineLock
from lopa.engine.output import Event
from lopa.engine.session import Session
from lopa.errors import CapacityError
from lopa.runner.base import InFlight, Runner
from lopa.types import Plan, Stats


@dataclass(slots=True)
class InFlightRound:
    """A round that has been launched: its sessions, and the forward of their plans."""

    sessions: list[Session]
    forward: InFlight
    lane: int  # of the runner
    seconds: float  # that it is expected to take; 0: nobody asks

    @classmethod
    def launch(
        cls, runner: Runner, lane: int, turn: list[Session], seconds: float, now: float
    ) -> InFlightRound:
        plans = []
        for session in turn:
            if session.launched_at is None:  # a long prompt takes several forwards
                session.launched_at = now
            plans.append((session.slot, _plan(session)))
        return cls(turn, runner.launch(plans, lane), lane, seconds)

    def wait(self) -> list[tuple[Session, Stats]]:
        """The sessions whose statistics are there; a prompt may want another forward."""
        found = zip(self.sessions, self.forward.wait(), strict=True)
        return [(session, stats) for session, stats in found if stats is not None]


class Scheduler(Engine):
    def __init__(
        self,
        runner: Runner,
        *,
        max_running: int = MAX_RUNNING,
        token_budget: int = TOKEN_BUDGET,
        overlap: bool = True,  # launch the next round before the events of this one are read
        cost: RoundCost | None = None,  # of a round; None: not known until a session has it
        lock: EngineLock | None = None,
    ) -> None:
        super().__init__(max_running, token_budget, lock)
        self.runner = runner
        self.overlap = overlap and runner.is_async
        self.in_flight: list[InFlightRound] = []  # the oldest first
        self.chooser = BranchChooser(runner.cost, lambda: self.token_budget, cost)
        # Of the last round: what the device would have waited for the host, and records
        self.host_seconds = self.record_seconds = 0.0
        # Of a session in the round that was launched last: tokens forwarded, branches
        self._tokens_each = self._branches_each = 0.0

    def check(self, session: Session) -> None:
        self.runner.check(session.capacity)

    def add(self, session: Session) -> None:
        self.check(session)
        self.waiting.append(session)

    def _abort(self, session: Session) -> None:
        for queue in (self.waiting, self.running):
            if session in queue:
                queue.remove(session)
        # The others' plans are launched again, without it.
        self.in_flight = [one for one in self.in_flight if session not in one.sessions]
        self._release(session)

    @property
    def kv_pages(self) -> tuple[int, int] | None:
        return self.runner.kv_pages

    def _step(self) -> list[tuple[Session, Event]]:
        began = time.perf_counter()
        if not self.in_flight:
            self._launch(began)
        if not self.in_flight:
            return []
        one = self.in_flight.pop(0)
        ready = time.perf_counter()
        done = one.wait()
        found = time.perf_counter()
        if len(one.sessions) < len(self.running):
            for session in one.sessions:  # to the end of the queue
                self.running.remove(session)
                self.running.append(session)
        winners = [(session, session.choose(stats)) for session, stats in done]
        # What an answer that is complete would write is for those who begin like it, if for anyone.
        self.runner.commit(
            [(s.slot, row) for s, row in winners if not s.is_done or self.runner.shares(s.slot)]
        )
        now = time.perf_counter()
        spent = []
        for session, _ in done:
            assert session.launched_at is not None
            spent.append((session, now - session.launched_at))
            session.launched_at = None
            if session.is_done:
                self.running.remove(session)
                self._release(session)  # its slot is for the next one
        if self.overlap:
            self._launch(now)
        launched = time.perf_counter()
        self.host_seconds = ready - began + launched - found
        events = [(session, session.record(seconds)) for session, seconds in spent]
        self.record_seconds = time.perf_counter() - launched
        self.chooser.learn([session for session, _ in done], one.seconds)
        return events

    def _launch(self, now: float) -> None:
        """Launch what is to be in flight. now: when its time begins."""
        self.chooser.keep(self.running, self._admit())
        halves = self._goes_in_halves()
        if self.in_flight and not halves:
            return  # all go together when those are done
        most = -(-len(self.running) // 2) if halves else len(self.running)
        lanes = {0, 1} if halves else {0}
        for lane in sorted(lanes - {one.lane for one in self.in_flight}):
            turn, seconds = self._next_turn(most, halves)
            if turn:
                self.chooser.rounds += len(turn)
                one = InFlightRound.launch(self.runner, lane, turn, seconds, now)
                self.in_flight.append(one)

    def _goes_in_halves(self) -> bool:
        """Whether two rounds in turn, one on the device and one on the host, take less time."""
        count = len(self.running)
        cost = self.chooser.cost
        if cost is None or count < 2 or not self.overlap or self.runner.lanes < 2:
            return False
        return cost.halves_pay(int(count * self._tokens_each), self._branches_each, count)

    def _next_turn(self, most: int, halves: bool) -> tuple[list[Session], float]:
        """The sessions of the next round: at most so many, as far as the token budget allows.

        And the seconds it is expected to take, where that is known.
        """
        in_flight = {session for one in self.in_flight for session in one.sessions}
        ready = [session for session in self.running if session not in in_flight]
        turn: list[Session] = []
        choice = self.chooser.choose(ready[:most], self.running)
        forwarded, branches = 0, []
        for session in ready[:most]:
            number = choice.branches.get(session)
            if number is None:
                plan = _plan(session)
                tokens, own = self.runner.cost(plan), len(plan.rows) - 1
            else:
                own = min(number, len(session.decoder.drafts))
                tokens = choice.offers[session].row_length * (own + 1)
            if turn and forwarded + tokens > self.token_budget:
                break
            forwarded += tokens
            branches.append(own)
            turn.append(session)
        if turn:
            self._tokens_each = forwarded / len(turn)
            self._branches_each = sum(branches) / len(turn)
        for session in turn:
            if session in choice.branches:
                session.decoder.take(choice.branches[session], choice.rounds)
        cost = self.chooser.cost
        # Where a number is kept no pace is asked for, and a session that is alone has its own.
        if cost is None or self.chooser.keeps or len(self.running) == 1:
            return turn, 0.0
        if halves:  # the host has the other half meanwhile
            return turn, cost(2 * forwarded, 2 * branches) / 2
        return turn, cost(forwarded, branches)

    def _admit(self) -> list[Session]:
        """Returns those that are new."""
        if not self.running:
            self.chooser.forget()
        new: list[Session] = []
        while self.waiting and len(self.running) + len(new) < self.max_running:
            if not self._open(self.waiting[0]):
                break  # no capacity until another has finished
            new.append(self.waiting.popleft())
        if self.waiting and not (self.running or new):
            raise CapacityError("no capacity in the KV cache: other requests hold it")
        # New ones go first, in their order: their first round is what their users wait for.
        self.running.extendleft(reversed(new))
        return new

    def _open(self, session: Session) -> bool:
        """Give a session a slot of the runner, and its cache if it goes on from elsewhere."""
        runner = self.runner
        # A session that goes on writes its own cache: what others have cached is not the same. Nor
        # is that of a prompt with other text behind a gap.
        alone = session.replay or session.decoder.gaps
        prompt = () if alone else session.trace.prompt_ids
        slot = runner.open(session.config, session.capacity, prompt)
        if slot is None:
            return False
        session.slot = slot
        if not session.replay:
            session.decoder.reuse(runner.reused(slot))
        for plan in session.replay:
            while runner.forward([(slot, plan)])[0] is None:
                pass
            runner.commit([(slot, 0)])
        session.replay = ()
        return True

    def _release(self, session: Session) -> None:
        if session.slot >= 0:
            self.runner.close(session.slot)
            session.slot = -1


def _plan(session: Session) -> Plan:
    plan = session.plan()
    assert plan is not None  # a session that is done does not run
    return plan
