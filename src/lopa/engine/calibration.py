"""What a round costs on this device, measured once: the budget of `branches="auto"` needs it.

Whole rounds are timed, the decoder's own time included, for the numbers of branches that auto
chooses from; where that takes long the largest are left out, since on a slow device time grows
with tokens evenly. The measure belongs to the run, not to a request: it is taken once and kept.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

from lopa.config import AUTO_BRANCHES, DecodeConfig
from lopa.decoding.budget import EVERY_ROUND_THE_SAME, RoundCost
from lopa.decoding.decoder import Decoder
from lopa.engine.runner import Runner
from lopa.engine.session import Session
from lopa.errors import CapacityError
from lopa.models.config import ModelConfig

WINDOW = 64  # tokens of a row: two blocks of 32, as in the middle of an answer
PREFIX = 32  # of the prompt
ROUNDS = 3  # timed for each number of branches
SECONDS = 1.0  # after which no further number of branches is measured; there are two at least


def measure(runner: Runner, model: ModelConfig, settings: Callable[..., DecodeConfig]) -> RoundCost:
    """settings: makes a configuration that suits the model."""
    began = time.perf_counter()
    found: list[tuple[int, float]] = []
    for branches in AUTO_BRANCHES:
        if len(found) < 2 or time.perf_counter() - began < SECONDS:
            try:
                found.append(_time(runner, model, settings, branches))
            except CapacityError:  # nor would an answer with so many branches have room
                break
    if not found:
        return EVERY_ROUND_THE_SAME
    # More tokens never cost less: a point below the one before it is noise.
    seconds = itertools.accumulate((s for _, s in found), max)
    return RoundCost(tuple((t, s) for (t, _), s in zip(found, seconds, strict=True)))


def _time(
    runner: Runner, model: ModelConfig, settings: Callable[..., DecodeConfig], branches: int
) -> tuple[int, float]:
    """(tokens, median seconds) of rounds whose window is full."""
    block = settings(decoder="lopa").block_size
    window = max(WINDOW // block, 1) * block
    asked: dict[str, Any] = {"append_at": 0.0, "activate_at": 1.0, "threshold": 1.0}
    config = settings(
        decoder="lopa", branches=branches, max_new_tokens=window, early_stop=False, **asked
    )
    ids = [i for i in range(PREFIX + 1) if i != model.mask_id][:PREFIX]
    decoder = Decoder(
        config,
        ids,
        mask_id=model.mask_id,
        eos_ids=(),
        shift=model.shift,
        aligned=model.trained_block is not None,
    )
    session = Session(runner, None, decoder, ids)
    times: list[float] = []
    tokens = 0
    try:
        while len(times) < ROUNDS + 1:
            began = time.perf_counter()
            event = session.step()
            if event is None:
                break
            record = event.round
            rows = len(record.branches)
            if rows == branches + 1 and record.branches[-1].end == decoder.window.end:
                times.append(time.perf_counter() - began)
                tokens = rows * (record.branches[-1].end - record.start)
    finally:
        session.close()
    return tokens, statistics.median(times[1:] or times)
