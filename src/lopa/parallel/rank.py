"""A model as one rank of a group holds it: `LLM` over the ranks' shared runner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from lopa.engine.llm import LLM
from lopa.engine.runner import ReferenceRunner, Runner
from lopa.engine.statistics import statistics
from lopa.parallel.branch import BranchParallel
from lopa.parallel.mesh import Mesh
from lopa.parallel.tensor import shard


class RankLLM(LLM):
    """Every rank makes one, asks it the same in the same order, and gets the same answers."""

    runner: BranchParallel

    def __init__(self, model: str | Path, *, mesh: Mesh, **options: Any) -> None:
        self.mesh = mesh
        super().__init__(model, **options, device=str(mesh.device))
        mesh.meet()

    def _make_runner(self) -> Runner:
        find = statistics
        if self.mesh.tensors > 1:
            find = shard(self.model, self.mesh, self.device)
        return BranchParallel(ReferenceRunner(self.model, find), self.mesh)

    @property
    def _read_to(self) -> torch.device:
        return self.device if self.mesh.tensors == 1 else torch.device("cpu")
