"""An asynchronous backend without a device: what it launches is done at once, staging included."""

from __future__ import annotations

from typing import Any

from lopa import LLM
from lopa.runner.backend_torch import Found, TorchBackend
from lopa.runner.paged import PagedRunner


class Eager(TorchBackend):
    is_async = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.forwards = 0  # all of them
        self.begun = 0
        self.finished = 0  # of those begun, the ones that were of use
        self._found: Found | None = None

    def forward(self, *args: Any) -> Found:
        self.forwards += 1
        self._found = None  # another one has been since
        return super().forward(*args)

    def begin(self, *args: Any) -> None:
        self.begun += 1
        self._found = self.forward(*args)

    def finish(self) -> Found:
        assert self._found is not None
        self.finished += 1
        return self._found


def make_eager(llm: LLM) -> Eager:
    """Let the model run on an eager backend; returns it."""
    runner = llm.runner
    assert isinstance(runner, PagedRunner)
    tokens = runner.capacity
    llm.runner = PagedRunner(llm.model, tokens, reuse=runner.reuse, backend=Eager)
    backend = llm.runner.backend
    assert isinstance(backend, Eager)
    return backend
