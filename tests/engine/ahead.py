"""An asynchronous backend without a device: what it launches is done at once, staging included."""

from __future__ import annotations

from typing import Any

from lopa import LLM
from lopa.runner.backend_torch import Found, PendingStats, TorchBackend
from lopa.runner.paged import PagedRunner


class Eager(TorchBackend):
    is_async = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.forwards = 0  # all of them
        self.begun = 0
        self.finished = 0  # of those begun, the ones that were of use
        self._last: PendingStats | None = None

    def forward(self, *args: Any) -> Found:
        return self._launch(*args).wait()

    def launch(self, *args: Any) -> PendingStats:
        self.begun += 1
        in_flight = self._launch(*args)

        def wait() -> Found:
            assert in_flight is self._last  # no other one has been launched since
            self.finished += 1
            return in_flight.wait()

        return PendingStats(wait)

    def _launch(self, *args: Any) -> PendingStats:
        self.forwards += 1
        in_flight = self._last = super().launch(*args)
        return in_flight


def make_eager(llm: LLM) -> Eager:
    """Let the model run on an eager backend; returns it."""
    runner = llm.runner
    assert isinstance(runner, PagedRunner)
    tokens = runner.capacity
    llm.runner = PagedRunner(llm.model, tokens, reuse=runner.reuse, backend=Eager)
    backend = llm.runner.backend
    assert isinstance(backend, Eager)
    return backend
