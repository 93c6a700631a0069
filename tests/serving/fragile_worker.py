"""An engine process that dies, or fails in a round, when a certain token is in a prompt."""

from __future__ import annotations

import os
import sys
from typing import Any

from fragile import DEADLY, FAULTY

from lopa.engine.scheduler import Scheduler
from lopa.errors import LopaError
from lopa.serving.engine_process import worker

step = Scheduler.step


def fragile_step(self: Scheduler) -> Any:
    events = step(self)
    for session, event in events:
        if event.round.index == 3 and DEADLY in session.trace.prompt_ids:
            os._exit(1)
        if event.round.index == 3 and FAULTY in session.trace.prompt_ids:
            raise LopaError("not numbers")
    return events


Scheduler.step = fragile_step  # type: ignore[method-assign]
os._exit(worker.main(int(sys.argv[1])))
