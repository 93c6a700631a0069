"""`LLM` over ranks of its own: no weights here, the rounds happen in other processes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from lopa.config import RANK_TIMEOUT, DecodeConfig
from lopa.decoding.branch_budget import RoundCost
from lopa.decoding.decoder import Decoder
from lopa.distributed.fork_server import Nursery
from lopa.distributed.mesh import backend_for
from lopa.distributed.placement import places
from lopa.distributed.rank_llm import given_cost
from lopa.distributed.supervisor import Supervisor
from lopa.engine.llm import LLM
from lopa.engine.scheduler import MAX_RUNNING, TOKEN_BUDGET
from lopa.engine.session import Event, Session
from lopa.errors import ConfigError
from lopa.models import checkpoint
from lopa.models.config import ModelConfig
from lopa.runner.base import Runner, check_capacity
from lopa.runner.paged import Reuse
from lopa.types import Plan, Stats


class ParallelLLM(LLM):
    """The same surface as `LLM`; `close` it, or leave its `with` block, to end the ranks."""

    def __init__(
        self,
        model: str | Path,
        *,
        branch_parallel: int = 1,
        tensor_parallel: int = 1,
        rank_timeout: float = RANK_TIMEOUT,
        device: str = "auto",
        report: Callable[[str], None] | None = None,
        nursery: Nursery | None = None,
        **options: Any,
    ) -> None:
        options.pop("progress", None)
        super().__init__(model, device=device, **options)
        if tensor_parallel > 1:
            from lopa.distributed.tensor_parallel import check  # slow to import

            check(self.config, tensor_parallel)
        world = branch_parallel * tensor_parallel
        if branch_parallel < 1 or tensor_parallel < 1:
            raise ConfigError("branch-parallel and tensor-parallel must be at least 1")
        if rank_timeout <= 0:
            raise ConfigError(f"rank-timeout must be above 0: got {rank_timeout}")
        self.supervisor = Supervisor(
            str(model),
            options,
            places(device, world),
            tensors=tensor_parallel,
            backend=backend_for(self.device, world),
            timeout=rank_timeout,
            report=report,
            nursery=nursery,
        )

    def engine(
        self, *, max_running: int = MAX_RUNNING, token_budget: int = TOKEN_BUDGET
    ) -> Supervisor:
        """Its one supervisor, with these limits."""
        self.supervisor.limit(max_running, token_budget)
        return self.supervisor

    def forward(self, *arguments: Any, **options: Any) -> Tensor:
        raise ConfigError("raw logits are for one device: use LLM")

    def close(self) -> None:
        self.supervisor.end()

    def __enter__(self) -> ParallelLLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _load_weights(
        self,
        folder: Path | None,
        config: ModelConfig,
        adapter: Path | None,
        progress: checkpoint.Progress | None,
    ) -> None:
        """The ranks read them."""

    def _check_fits(self) -> None:
        """The ranks see."""

    def _make_runner(self, cache_tokens: int | None, reuse: Reuse, backend: str) -> Runner:
        return _Elsewhere(self)

    @property
    def round_cost(self) -> RoundCost:
        return given_cost(self._round_cost)

    def _make_session(self, decoder: Decoder, ids: Sequence[int], limit: int | None) -> Session:
        return _RemoteSession(self, decoder, ids, limit)


class _RemoteSession(Session):
    """Can also be stepped by itself: the supervisor's rounds go by until one is its own."""

    def __init__(
        self, llm: ParallelLLM, decoder: Decoder, ids: Sequence[int], limit: int | None
    ) -> None:
        super().__init__(llm.runner, llm.tokenizer, decoder, ids, limit)
        self._llm = llm
        self._events: deque[Event] = deque()
        self._added = False

    def step(self, *, ahead: bool = False) -> Event | None:
        supervisor = self._llm.supervisor
        if not self._added and self.output is None:
            supervisor.add(self)
            self._added = True
        while not self._events:
            if self.output is not None:
                return None
            if self._closed:
                raise RuntimeError("this session is closed")
            for session, event in supervisor.step():
                if isinstance(session, _RemoteSession):
                    session._events.append(event)
        return self._events.popleft()

    def close(self) -> None:
        first = not self._closed
        super().close()
        if first and self.decoder.finish is None:  # else the ranks know
            self._llm.supervisor.abort(self)


class _Elsewhere:
    """In place of a runner."""

    def __init__(self, llm: ParallelLLM) -> None:
        self._llm = llm

    def check(self, capacity: int) -> None:
        check_capacity(capacity, self._llm.supervisor.capacity)

    def open(self, config: DecodeConfig, capacity: int, prompt: Sequence[int] = ()) -> int | None:
        raise RuntimeError("the ranks hold the slots: add sessions to `engine()`")

    def reused(self, slot: int) -> int:
        return 0

    def close(self, slot: int) -> None: ...

    def cost(self, plan: Plan) -> int:
        return plan.rows.size

    def begin(self, plans: Sequence[tuple[int, Plan]]) -> bool:
        return False

    def forward(self, plans: Sequence[tuple[int, Plan]]) -> Sequence[Stats | None]:
        raise RuntimeError("the ranks forward: add sessions to `engine()`")

    def commit(self, winners: Sequence[tuple[int, int]]) -> None: ...
