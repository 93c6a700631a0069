"""A model as one rank of a group holds it: `LLM` over the ranks' shared runner."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from lopa.decoding.decoder import Decoder
from lopa.engine.llm import LLM
from lopa.engine.runner import ReferenceRunner, Runner
from lopa.engine.session import Session
from lopa.engine.statistics import Statistics, statistics
from lopa.parallel.branch import BranchParallel
from lopa.parallel.mesh import Mesh
from lopa.parallel.tensor import shard
from lopa.sequence import Plan


class RankSession(Session):
    """A session that may go on where another group was lost."""

    replays: Sequence[Plan] = ()
    number = -1  # the supervisor's
    held = -1  # its slot, also after it is closed

    def restore(self, decoder: Decoder, replays: Sequence[Plan]) -> None:
        """Take a decoder over, and the forwards that write its cache anew: see `history`."""
        self.decoder, self.replays = decoder, replays

    def open(self) -> bool:
        if not super().open():
            return False
        self.held = self.slot
        replays, self.replays = self.replays, ()
        for plan in replays:
            while self.runner.forward([(self.slot, plan)])[0] is None:
                pass
            self.runner.commit([(self.slot, 0)])
        return True


class RankLLM(LLM):
    """Every rank makes one, asks it the same in the same order, and gets the same answers."""

    runner: BranchParallel

    def __init__(
        self,
        model: str | Path,
        *,
        mesh: Mesh,
        runner: type[BranchParallel] = BranchParallel,
        **options: Any,
    ) -> None:
        self.mesh = mesh
        self._kind = runner
        super().__init__(model, **options, device=str(mesh.device))
        mesh.meet()

    def close(self) -> None:
        self.mesh.leave()

    def _make_runner(self) -> Runner:
        self.model.config = self.config
        find: Statistics = statistics
        if self.mesh.tensors > 1:
            find = shard(self.model, self.mesh, self.device)
        return self._kind(ReferenceRunner(self.model, find), self.mesh)

    def _make_session(self, decoder: Decoder, ids: Sequence[int]) -> RankSession:
        return RankSession(self.runner, self.tokenizer, decoder, ids)

    @property
    def _read_to(self) -> torch.device:
        return self.device if self.mesh.tensors == 1 else torch.device("cpu")
