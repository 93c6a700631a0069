"""A model as one rank of a group holds it: whole, or its part of it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from lopa.decoding.round_cost import RoundCost
from lopa.distributed.branch_runner import BranchRunner
from lopa.distributed.mesh import Mesh
from lopa.distributed.tensor_parallel import join_parts, part_of
from lopa.engine import cost_measurement, loader
from lopa.engine.base import MAX_RUNNING, TOKEN_BUDGET
from lopa.engine.base_llm import BaseLLM
from lopa.engine.loader import LoadOptions
from lopa.engine.scheduler import Scheduler
from lopa.models import checkpoint
from lopa.runner.device import check_fits


class RankLLM(BaseLLM):
    """Every rank makes one, asks it the same in the same order, and gets the same outputs."""

    def __init__(
        self,
        model: str | Path,
        *,
        mesh: Mesh,
        progress: checkpoint.Progress | None = None,
        **options: Any,  # of `LLM`
    ) -> None:
        given = LoadOptions(**options)
        super().__init__(model, given, mesh.device)
        self.mesh = mesh
        is_whole, part = mesh.tensor_parallel == 1, part_of(mesh)
        check_fits(part.config(self.config), self.device, self.dtype, self.quantize)
        self.tokenizer = loader.load_tokenizer(self.name, self.config)
        self.model = weights = loader.load_weights(
            self.name,
            self.config,
            given,
            self.device,
            self.dtype,
            progress,
            part,
            self.quantize,
        )
        self.config = weights.config
        self._finish_loading(given)
        weights.config = self.config
        statistics = None if is_whole else join_parts(weights, mesh)
        local = loader.make_runner(
            weights,
            given,
            backend=given.backend,
            # Capacity must be the same everywhere: it decides what is admitted, and how products
            # are rounded.
            agree=mesh.min_over_ranks,
            share=mesh.world if mesh.backend == "gloo" else 1,
        )
        if statistics is not None:
            local.backend.statistics = statistics
            local.backend.class_scores = statistics.class_scores
        self.capacity = local.capacity
        self.runner, self._local = BranchRunner(local, mesh), local
        mesh.barrier()

    def engine(
        self, *, max_running: int = MAX_RUNNING, token_budget: int = TOKEN_BUDGET
    ) -> Scheduler:
        return Scheduler(
            self.runner, max_running=max_running, token_budget=token_budget, lock=self._lock
        )

    def close(self) -> None:
        self._local.backend.drop_graphs()  # nccl waits for those that hold sums of its group
        self.mesh.close()

    # -- what a round costs: the same number on every rank, by whoever's clock -----------------

    def _measure_cost(self) -> RoundCost:
        given = self.runner, self.config, self.decode_config
        agree = self.mesh.max_over_ranks
        return self._lock.run(partial(cost_measurement.measure, *given, agree=agree))

    def _kept_cost(self) -> RoundCost | None:
        found = super()._kept_cost() if self.mesh.rank == 0 else None
        kept: RoundCost | None = self.mesh.broadcast_object(found)
        return kept

    def _keep_cost(self, cost: RoundCost) -> None:
        if self.mesh.rank == 0:
            super()._keep_cost(cost)

    def _measured_with(self) -> dict[str, str]:
        mesh = self.mesh
        return {
            **super()._measured_with(),
            "branch_parallel": str(mesh.branch_parallel),
            "tensor_parallel": str(mesh.tensor_parallel),
            "collectives": mesh.backend,
        }
