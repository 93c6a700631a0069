"""`LLM` over ranks of its own: no weights here, the rounds happen in other processes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from lopa.config import RANK_TIMEOUT
from lopa.decoding.round_cost import RoundCost
from lopa.distributed.fork_server import ForkServer
from lopa.distributed.mesh import backend_for
from lopa.distributed.placement import placements
from lopa.distributed.remote_engine import RemoteEngine
from lopa.distributed.supervisor import Supervisor
from lopa.engine import loader
from lopa.engine.base import MAX_RUNNING, TOKEN_BUDGET
from lopa.engine.base_llm import BaseLLM
from lopa.engine.loader import LoadOptions
from lopa.errors import ConfigError
from lopa.models import part
from lopa.models.checkpoint import Progress
from lopa.runner.device import choose_device


class ParallelLLM(BaseLLM):
    """The same surface as `LLM`; `close` it, or leave its `with` block, to end the ranks.

    Threads take turns as with `LLM`; `close` waits for the call that is under way. A forked child
    may not use it, and ends no rank of its parent.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        branch_parallel: int = 1,
        tensor_parallel: int = 1,
        rank_timeout: float = RANK_TIMEOUT,
        device: str = "auto",
        report: Callable[[str], None] | None = None,  # told of ranks that are lost and replaced
        progress: Progress | None = None,  # as for `LLM`
        fork_server: ForkServer | None = None,  # where one has been started already
        **options: Any,  # of `LLM`
    ) -> None:
        given = LoadOptions(**options)
        super().__init__(model, given, choose_device(device))
        self.tokenizer = loader.load_tokenizer(self.name, self.config)
        self._finish_loading(given)
        if tensor_parallel > 1:
            part.check(self.config, tensor_parallel)
        if branch_parallel < 1 or tensor_parallel < 1:
            raise ConfigError("branch-parallel and tensor-parallel must be at least 1")
        if rank_timeout <= 0:
            raise ConfigError(f"rank-timeout must be above 0: got {rank_timeout}")
        world = branch_parallel * tensor_parallel
        self.supervisor = Supervisor(
            str(model),
            options,
            placements(device, world),
            tensor_parallel=tensor_parallel,
            backend=backend_for(self.device, world),
            timeout=rank_timeout,
            report=report,
            progress=progress,
            fork_server=fork_server,
        )

    def engine(
        self, *, max_running: int = MAX_RUNNING, token_budget: int = TOKEN_BUDGET
    ) -> RemoteEngine:
        return RemoteEngine(
            self.supervisor, max_running=max_running, token_budget=token_budget, lock=self._lock
        )

    def _measure_cost(self) -> RoundCost:
        cost = self._lock.run(partial(self.supervisor.round_cost, anew=True))
        assert cost is not None
        return cost

    def _kept_cost(self) -> RoundCost | None:
        return self._lock.run(partial(self.supervisor.round_cost, anew=False))

    def _keep_cost(self, cost: RoundCost) -> None:
        """The ranks have kept it."""

    def close(self) -> None:
        if not self._lock.is_forked:  # the ranks are the parent's
            with self._lock.held():
                self.supervisor.close()
