"""What a round costs on this device, measured once: the budget of `branches="auto"` needs it.

Whole rounds are timed, the decoder's own time included: of one session, for the numbers of branches
that auto chooses from, and of several, which cost the host more, and the forward, too, where it
attends to one sequence after the other. How much more a session with branches costs the host is not
timed: rounds that are made to be alike agree on nothing, and what branches agree on is what takes
the time. Where a round takes long the largest are left out, since on a slow device time grows with
tokens evenly. An asynchronous runner is timed as it goes on from round to round of one answer:
after a round of another size it takes longer. What that takes its host is timed in rounds of
sessions that differ. The measure belongs to the run, not to a request: it is taken once and kept.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

from lopa.config import AUTO_BRANCHES, DecodeConfig
from lopa.decoding.decoder import Decoder
from lopa.decoding.round_cost import EVERY_ROUND_THE_SAME, USUAL_ROW, RoundCost
from lopa.engine.scheduler import Scheduler
from lopa.engine.session import Session
from lopa.errors import CapacityError
from lopa.models.config import ModelConfig
from lopa.models.tokenizer import Tokenizer
from lopa.runner.base import Runner
from lopa.types import Round

# Tokens of a row, branches and sessions: one block of 32 as an answer begins, two as in the middle
# of one. The fewest tokens first.
WINDOW, SEVERAL, MANY, CROWD = USUAL_ROW, 4, 8, 32
ROUND_SIZES = (
    (WINDOW // 2, 0, 1),
    *((WINDOW, branches, 1) for branches in AUTO_BRANCHES[:3]),
    (WINDOW, 0, SEVERAL),  # as many tokens as the one before it
    *((WINDOW, branches, 1) for branches in AUTO_BRANCHES[3:]),
    (WINDOW, AUTO_BRANCHES[3], MANY),
)
PREFIX = 32  # of the prompt
QUOTA = 2  # tokens of each block that a round fills
# Of sessions that differ: rounds in a turn, and that quota. Their windows move more often.
MIXED_ROUNDS, MIXED_QUOTA = 3, 4
# What answers take the host over these rounds, which are made up: they fill more tokens, begin and
# end. And what a session with AUTO_BRANCHES takes over one without: what more tokens take is left
# out, as each takes the same however many a round brings. All on the built-in tasks
# (measurements/load_time.py, host_growth.py).
HOST_OF_ANSWERS, RECORDS_OF_ANSWERS = 1.2, 1.8
HOST_GROWTH = (1.0, 1.55, 2.0, 2.4, 3.2)
RECORDS_GROWTH = (1.0, 1.0, 1.2, 1.6, 2.0)
# Rounds timed for each number of branches, in turn: a disturbance meets them all. The faster half
# of the turns counts.
LEAST_TURNS, MOST_TURNS = 7, 30
STEADY = 1.25  # of the turns that count, the slowest over the fastest: more is a busy machine
ENOUGH = 2.0  # seconds: with the least turns done, and steady, no more are begun
LONG = 10.0  # seconds: nor with any done; rounds this slow differ little
SECONDS = 0.17  # a round that takes longer is the last one measured; there are three at least
LEAST_GROWTH = 1.5  # of such a round with twice the tokens: the device is limited by compute


def measure(
    runner: Runner,
    model: ModelConfig,
    settings: Callable[..., DecodeConfig],  # makes a configuration that suits the model
    tokenizer: Tokenizer | None = None,  # of who makes text of what is decoded
    agree: Callable[[float], float] = float,
) -> RoundCost:
    """agree: makes one number of what the clocks of several ranks say, the same on each of them."""
    timed: list[_Timed] = []
    mixed: list[_Mixed] = []
    try:
        for size in ROUND_SIZES:
            if len(timed) >= 3 and agree(min(timed[-1].seconds)) > SECONDS:
                break
            one = _Timed(runner, model, settings, tokenizer, *size)
            try:
                for _ in range(2):  # the first may compile kernels
                    one.turn()
            except CapacityError:  # nor would an answer with so many branches have room
                break
            # A block may be as large as the window.
            if one.seconds and (one.sessions > 1 or not timed or one.tokens > timed[-1].tokens):
                timed.append(one)
            else:
                one.engine.close()
        # As masks get fewer, graphs of more sizes are captured: not while rounds are timed. The
        # largest rounds keep their size meanwhile.
        for one in timed[:-1] if runner.is_async else ():
            one.run_through()
        if runner.is_async and any(one.sessions > 1 for one in timed):
            for sessions in (MANY, CROWD):
                try:
                    mixed.append(_Mixed(runner, model, settings, tokenizer, sessions))
                except CapacityError:
                    break
        for one in timed:
            one.seconds.clear()  # those were to get ready
            one.host_seconds.clear()
            one.record_seconds.clear()
        began = time.perf_counter()
        for turn in range(MOST_TURNS):
            is_steady = turn >= LEAST_TURNS and agree(_spread(timed)) <= STEADY
            if turn and agree(time.perf_counter() - began) > (ENOUGH if is_steady else LONG):
                break
            for each in timed:
                each.turn()
            for crowd in mixed:
                crowd.turn()
    finally:
        for engine in [one.engine for one in timed] + [crowd.engine for crowd in mixed]:
            engine.close()
    if not timed:
        return EVERY_ROUND_THE_SAME
    return _cost(timed, agree, runner, mixed)


def _slowdown(timed: list[_Timed]) -> list[float]:
    """Of each turn: what its rounds took over the fastest of their size, in the mean."""
    each = [[seconds / min(one.seconds) for seconds in one.seconds] for one in timed]
    return list(map(statistics.fmean, zip(*each, strict=False)))


def _calm(timed: list[_Timed]) -> list[int]:
    """The faster half of the turns, the fastest first.

    The fastest rounds of each size may be of different moments of a machine whose speed varies;
    those of a turn are of the same.
    """
    slowdown = _slowdown(timed)
    return sorted(range(len(slowdown)), key=slowdown.__getitem__)[: (len(slowdown) + 1) // 2]


def _spread(timed: list[_Timed]) -> float:
    """Of the turns that count, the slowest over the fastest."""
    slowdown, calm = _slowdown(timed), _calm(timed)
    return slowdown[calm[-1]] / slowdown[calm[0]]


def _cost(
    timed: list[_Timed],
    agree: Callable[[float], float],
    runner: Runner,
    mixed: Sequence[_Mixed] = (),  # of many sessions, and of more
) -> RoundCost:
    calm = _calm(timed)

    def typical(seconds: list[float]) -> float:
        return agree(statistics.median([seconds[turn] for turn in calm]))

    medians = [tuple(map(typical, (o.seconds, o.host_seconds, o.record_seconds))) for o in timed]
    sizes = list(zip(timed, medians, strict=True))
    several = next(((o, m) for o, m in sizes if o.sessions > 1), None)
    first, record = [m[1:] for o, m in sizes if (o.sessions, o.branches) == (1, 0)][-1]
    # What a further session adds on the host and to its forward, and what sessions that differ do
    own = forwarded = mixed_round = 0.0
    if several is not None:
        size, (whole, on_host, on_records) = several
        own = max(0.0, (on_host - first) / (size.sessions - 1))
        record = on_records / size.sessions
        # Sequences are attended to one by one, or their statistics are.
        alone = next(m[0] - m[1] for o, m in sizes if o.tokens == size.tokens)
        forwarded = max(0.0, (whole - on_host - alone) / (size.sessions - 1))
    if len({crowd.sessions for crowd in mixed} - {1}) > 1:  # the KV cache may have room for few
        (few, on_few), (more, on_more) = [(m.sessions, typical(m.host_seconds)) for m in mixed]
        record = typical(mixed[-1].record_seconds) / more
        # Over one session alone: a share of mixed_round, and each of the others
        share, further = RoundCost.share_mixed(few), RoundCost.share_mixed(more)
        fewer, most = on_few - first, on_more - first
        both = share * (more - 1) - further * (few - 1)
        own = max(0.0, (share * most - further * fewer) / both)
        mixed_round = max(0.0, fewer - (few - 1) * own) / share
    # Of one session alone the rest is what every round costs.
    every_round = HOST_OF_ANSWERS * max(0.0, first - own)
    own, record = HOST_OF_ANSWERS * own, RECORDS_OF_ANSWERS * record
    host = [own * growth + forwarded for growth in HOST_GROWTH]
    records = [record * growth for growth in RECORDS_GROWTH]
    if not runner.is_async:  # nothing works meanwhile
        host, records = list(map(sum, zip(host, records, strict=True))), []
    points: dict[int, float] = {}
    for one, (whole, on_host, _) in sizes:
        if one.sessions == 1 or one.tokens > max(points):
            device = whole - on_host - one.sessions * forwarded
            points[one.tokens] = max(device, whole / 100)
    # More tokens never cost less.
    rising = itertools.accumulate((points[tokens] for tokens in sorted(points)), max)
    return RoundCost(
        _extrapolated(list(zip(sorted(points), rising, strict=True))),
        tuple(host),
        tuple(records),
        runner.padding,
        in_halves=runner.is_async and runner.lanes > 1,
        every_round=every_round,
        mixed_round=HOST_OF_ANSWERS * mixed_round,
    )


def _extrapolated(points: list[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """The points, and one behind them where rounds that take long were left out.

    A cost goes on behind its points as between the last two. A disturbance while they were timed
    may have made them alike: then branches would seem to cost nothing.
    """
    tokens, seconds = points[-1]
    if seconds > SECONDS and len(points) > 1:
        before, earlier = points[-2]
        least = earlier + (seconds - earlier) * (2 * tokens - before) / (tokens - before)
        if least < LEAST_GROWTH * seconds:
            points = [*points, (2 * tokens, LEAST_GROWTH * seconds)]
    return tuple(points)


def steady_session(
    model: ModelConfig,
    settings: Callable[..., DecodeConfig],
    branches: int | Literal["auto"],
    window: int,  # whole blocks
    prefix: int,  # tokens of the prompt
    tokenizer: Tokenizer | None = None,
    **more: Any,  # settings
) -> Session:
    """Its rounds keep their window: nothing passes the threshold, so each fills a token or two."""
    config = settings(
        decoder="lopa",
        branches=branches,
        max_new_tokens=window,
        append_at=0.0,
        activate_at=1.0,
        threshold=1.0,
        early_stop=False,
        **more,
    )
    ids = [1 + i % (model.vocab_size // 2) for i in range(prefix)]
    ids = [i if i != model.mask_id else 0 for i in ids]
    decoder = Decoder(
        config,
        ids,
        mask_id=model.mask_id,
        eos_ids=(),
        shift=model.shift,
        aligned=model.trained_block is not None,
    )
    return Session(decoder, tokenizer)


class _Timed:
    """Rounds of one number of branches and sessions whose windows are full."""

    def __init__(
        self,
        runner: Runner,
        model: ModelConfig,
        settings: Callable[..., DecodeConfig],
        tokenizer: Tokenizer | None,
        window: int,
        branches: int,
        sessions: int,
    ) -> None:
        block = settings(decoder="lopa").block_size
        window = max(window // block, 1) * block
        self.branches, self.sessions = branches, sessions
        # The records of several take longer than the device does: what it takes shows only where
        # nothing is done meanwhile.
        self.engine = Scheduler(runner, max_running=sessions, overlap=sessions == 1)
        shape = branches, window, PREFIX
        # As many tokens a round as an answer has.
        self.make = partial(steady_session, model, settings, *shape, tokenizer, quota=QUOTA)
        self._add_sessions()
        self.tokens = 0  # of a round, once one was timed
        self.seconds: list[float] = []
        self.host_seconds: list[float] = []
        self.record_seconds: list[float] = []

    def turn(self) -> None:
        """Time a round that has all its branches and the full window."""
        for _ in range(2):  # when this answer has no more of them, the next one does
            while (record := self._next()) is not None:
                rows, end = len(record.branches), record.branches[-1].end
                tokens = self.sessions * rows * (end - record.start)
                is_full = rows == self.branches + 1 and end == self.end
                # The first round is the prompt's; as blocks are done the window gets shorter.
                if record.index > 1 and is_full and self.tokens in (0, tokens):
                    self.tokens = tokens
                    self.seconds.append(record.seconds)
                    self.host_seconds.append(self.engine.host_seconds)
                    self.record_seconds.append(self.engine.record_seconds)
                    return
            self.engine.close()
            self._add_sessions()

    def run_through(self) -> None:
        """Decode answers to their end."""
        while self._next() is not None:
            pass
        self.engine.close()
        self._add_sessions()

    def _add_sessions(self) -> None:
        """They are all the same, so their rounds are."""
        for _ in range(self.sessions):
            session = self.make()
            self.engine.add(session)
            self.end = session.capacity

    def _next(self) -> Round | None:
        """The next round of all, or the one after it where the runner is asynchronous.

        A round that was launched before others had their turns is done again and its time is of
        no use: the one behind it is timed.
        """
        was_launched = bool(self.engine.in_flight)
        events = self.engine.step()
        if events and self.engine.in_flight:
            events = self.engine.step()
        elif was_launched:  # an answer's last round
            return None
        return events[0][1].round if len(events) == self.sessions else None


class _Mixed:
    """Rounds of sessions that began evenly one after the other, so that nearly each moves a window.

    As one ends the next begins.
    """

    def __init__(
        self,
        runner: Runner,
        model: ModelConfig,
        settings: Callable[..., DecodeConfig],
        tokenizer: Tokenizer | None,
        sessions: int,
    ) -> None:
        block = settings(decoder="lopa").block_size
        shape = 0, max(WINDOW // block, 1) * block, PREFIX
        self.sessions = sessions
        self.make = partial(steady_session, model, settings, *shape, tokenizer, quota=MIXED_QUOTA)
        self.engine = Scheduler(runner, max_running=sessions)
        self.host_seconds: list[float] = []  # of a round, by turn
        self.record_seconds: list[float] = []
        self._lasts = max(1, block // MIXED_QUOTA)  # rounds of an answer
        self._rounds = 0
        ran = []
        for _ in range(4 * self._lasts):  # until all run, and graphs of all sizes are captured
            self._round()
            ran.append(len(self.engine.running))
        self.sessions = max(ran)  # those that there is room for

    def turn(self) -> None:
        rounds = [self._round() for _ in range(MIXED_ROUNDS)]
        on_host, on_records = (statistics.median(part) for part in zip(*rounds, strict=True))
        self.host_seconds.append(on_host)
        self.record_seconds.append(on_records)

    def _round(self) -> tuple[float, float]:
        """Seconds of the host between two forwards, and of records."""
        engine = self.engine
        self._rounds += 1
        wanted = min(self.sessions, -(-self.sessions * self._rounds // self._lasts))
        for _ in range(wanted - len(engine.running) - len(engine.waiting)):
            engine.add(self.make())
        engine.step()
        return engine.host_seconds, engine.record_seconds
