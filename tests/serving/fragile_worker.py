"""An engine process that does what `fragile` says."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from fragile import DEADLY, FAULTY, FOLDER, HELD, PANIC, SHORT

folder = Path(os.environ.get(FOLDER, "/nonexistent"))
starts = folder / "starts"
if starts.exists() and (left := int(starts.read_text())):  # before anything that takes time
    starts.write_text(str(left - 1))
    os._exit(1)

from lopa.engine.scheduler import Scheduler  # noqa: E402
from lopa.errors import LopaError  # noqa: E402
from lopa.models.tokenizer import Tokenizer  # noqa: E402
from lopa.serving.engine_process import encoding_queue, worker  # noqa: E402

step, encode = Scheduler.step, Tokenizer.encode


class PanicException(BaseException):
    """As the tokenizer's library raises it."""


def fragile_step(self: Scheduler) -> Any:
    while (folder / "stuck").exists():
        time.sleep(0.01)
    events = step(self)
    for session, event in events:
        if event.round.index == 3 and DEADLY in session.trace.prompt_ids:
            os._exit(1)
        if event.round.index == 3 and FAULTY in session.trace.prompt_ids:
            raise LopaError("not numbers")
    return events


def fragile_encode(self: Tokenizer, text: str, specials: bool = False) -> list[int]:
    if PANIC in text:
        raise PanicException("index out of bounds")
    while text.startswith(HELD) and not (folder / "go").exists():
        time.sleep(0.01)
    return encode(self, text, specials)


Scheduler.step = fragile_step  # type: ignore[method-assign]
Tokenizer.encode = fragile_encode  # type: ignore[method-assign]
encoding_queue.SHORT = SHORT
os._exit(worker.main(int(sys.argv[1])))
