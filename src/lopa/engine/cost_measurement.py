"""What a round costs on this device, measured once: the budget of `branches="auto"` needs it.

Whole rounds are timed, the decoder's own time included, for the numbers of branches that auto
chooses from; where a round takes long the largest are left out, since on a slow device time grows
with tokens evenly. An asynchronous runner is timed as it goes on from round to round of one answer:
after a round of another size it takes longer. The measure belongs to the run, not to a
request: it is taken once and kept.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from lopa.config import AUTO_BRANCHES, DecodeConfig
from lopa.decoding.branch_budget import EVERY_ROUND_THE_SAME, RoundCost
from lopa.decoding.decoder import Decoder
from lopa.engine.scheduler import Scheduler
from lopa.engine.session import Session
from lopa.errors import CapacityError
from lopa.models.config import ModelConfig
from lopa.runner.base import Runner
from lopa.types import Round

# Tokens of a row and branches: one block of 32 as an answer begins, two as in the middle of one.
WINDOW = 64
ROUND_SIZES = ((WINDOW // 2, 0), *((WINDOW, branches) for branches in AUTO_BRANCHES))
PREFIX = 32  # of the prompt
# Rounds timed for each number of branches, in turn: a disturbance meets them all.
LEAST_TURNS, MOST_TURNS = 7, 30
ENOUGH = 2.0  # seconds: with the least turns done, no more are begun
SECONDS = 0.1  # a round that takes longer is the last one measured; there are three at least


def measure(runner: Runner, model: ModelConfig, settings: Callable[..., DecodeConfig]) -> RoundCost:
    """settings: makes a configuration that suits the model."""
    timed: list[_Timed] = []
    try:
        for window, branches in ROUND_SIZES:
            if len(timed) >= 3 and min(timed[-1].seconds) > SECONDS:
                break
            one = _Timed(runner, model, settings, window, branches)
            try:
                for _ in range(2):  # the first may compile kernels
                    one.turn()
            except CapacityError:  # nor would an answer with so many branches have room
                break
            # A block may be as large as the window.
            if one.seconds and (not timed or one.tokens > timed[-1].tokens):
                timed.append(one)
            else:
                one.engine.close()
        for one in timed:
            one.seconds.clear()  # those were to get ready
        began = time.perf_counter()
        for turn in range(MOST_TURNS):
            if turn >= LEAST_TURNS and time.perf_counter() - began > ENOUGH:
                break
            for one in timed:
                one.turn()
    finally:
        for one in timed:
            one.engine.close()
    if not timed:
        return EVERY_ROUND_THE_SAME
    # The median: the fastest of each may be of different moments of a machine whose speed varies.
    # More tokens never cost less.
    seconds = itertools.accumulate((statistics.median(one.seconds) for one in timed), max)
    return RoundCost(tuple((one.tokens, s) for one, s in zip(timed, seconds, strict=True)))


def steady_session(
    model: ModelConfig,
    settings: Callable[..., DecodeConfig],
    branches: int | Literal["auto"],
    window: int,  # whole blocks
    prefix: int,  # tokens of the prompt
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
    return Session(decoder, None)


class _Timed:
    """Rounds of one number of branches whose window is full."""

    def __init__(
        self,
        runner: Runner,
        model: ModelConfig,
        settings: Callable[..., DecodeConfig],
        window: int,
        branches: int,
    ) -> None:
        block = settings(decoder="lopa").block_size
        window = max(window // block, 1) * block
        self.branches = branches
        self.engine = Scheduler(runner, max_running=1)
        self.make = partial(steady_session, model, settings, branches, window, PREFIX)
        self.session = self.make()
        self.engine.add(self.session)
        self.tokens = 0  # of a round, once one was timed
        self.seconds: list[float] = []

    def turn(self) -> None:
        """Time a round that has all its branches and the full window."""
        for _ in range(2):  # when this answer has no more of them, the next one does
            while (record := self._next()) is not None:
                rows, end = len(record.branches), record.branches[-1].end
                tokens = rows * (end - record.start)
                is_full = rows == self.branches + 1 and end == self.session.decoder.window.end
                # The first round is the prompt's; as blocks are done the window gets shorter.
                if record.index > 1 and is_full and self.tokens in (0, tokens):
                    self.tokens = tokens
                    self.seconds.append(record.seconds)
                    return
            self.engine.abort(self.session)
            self.session = self.make()
            self.engine.add(self.session)

    def _next(self) -> Round | None:
        """The next round, or the one after it where the runner is asynchronous.

        A round that was launched before others had their turns is done again and its time is of
        no use: the one behind it is timed.
        """
        was_launched = self.engine.in_flight is not None
        events = self.engine.step()
        if events and self.engine.in_flight is not None:
            events = self.engine.step()
        elif was_launched:  # an answer's last round
            return None
        return events[0][1].round if events else None
