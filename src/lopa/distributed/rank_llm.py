"""A model as one rank of a group holds it: `LLM` over the ranks' shared runner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lopa.decoding.branch_budget import RoundCost
from lopa.decoding.decoder import Decoder
from lopa.distributed.branch_runner import BranchParallel
from lopa.distributed.mesh import Mesh
from lopa.engine.llm import LLM
from lopa.engine.session import Session
from lopa.errors import ConfigError
from lopa.kernels.quantize import quantize
from lopa.models import checkpoint
from lopa.models.config import ModelConfig
from lopa.runner.backend import choose_backend, prepare
from lopa.runner.device import default_cache_tokens, memory_beside_cache
from lopa.runner.paged import PagedRunner, Reuse
from lopa.runner.statistics import Statistics, statistics
from lopa.types import Plan


class RankSession(Session):
    """A session that may go on where another group was lost."""

    number = -1  # the supervisor's
    held = -1  # its slot, also after it is closed
    _replays: Sequence[Plan] | None = None

    def restore(self, decoder: Decoder, replays: Sequence[Plan]) -> None:
        """Take a decoder over, and the forwards that write its cache anew: see `history`."""
        self.decoder, self._replays = decoder, replays

    def open(self) -> bool:
        if self._replays is None or self.slot >= 0:
            found = super().open()
            self.held = self.slot
            return found
        slot = self.runner.open(self.config, self.capacity)  # what others cached is not its own
        if slot is None:
            return False
        self.slot = self.held = slot
        for plan in self._replays:
            while self.runner.forward([(slot, plan)])[0] is None:
                pass
            self.runner.commit([(slot, 0)])
        self._replays = None
        return True


def given_cost(cost: RoundCost | None) -> RoundCost:
    """What a round costs must be the same number on every rank: it is not measured here."""
    if cost is None:
        raise ConfigError(
            "branches auto would be measured on each of several ranks and come out differently: "
            "give a number of branches, objective tpf, or round_cost"
        )
    return cost


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
        self._find: Statistics = statistics
        super().__init__(model, **options, device=str(mesh.device))
        mesh.meet()

    def close(self) -> None:
        self.mesh.leave()

    def _check_fits(self) -> None:
        if self.mesh.tensors == 1:
            super()._check_fits()

    def _load_weights(
        self,
        folder: Path | None,
        config: ModelConfig,
        adapter: Path | None,
        progress: checkpoint.Progress | None,
    ) -> None:
        if self.mesh.tensors == 1:
            super()._load_weights(folder, config, adapter, progress)
            return
        from lopa.distributed.tensor_parallel import cut, sum_outputs  # slow to import

        # Cut first and quantise the parts: a part's scales are its own.
        kind, self.quantize = self.quantize, None
        super()._load_weights(folder, config, adapter, progress)
        self._find = cut(self.model, self.mesh, self.device)
        if kind is not None:
            quantize(self.model, kind)
        sum_outputs(self.model, self.mesh)
        self.quantize = kind

    def _make_runner(self, cache_tokens: int | None, reuse: Reuse, backend: str) -> BranchParallel:
        mesh, device = self.mesh, self.device
        config = self.model.config = replace(  # of this rank's part
            self.model.config, mask_id=self.config.mask_id, eos_ids=self.config.eos_ids
        )
        if mesh.tensors > 1 and backend == "triton":
            raise ConfigError("the backend triton does not sum over parts: use sdpa, or leave it")
        if mesh.tensors > 1 and backend == "auto":
            backend = "sdpa"
        make = choose_backend(backend, config, device)
        # The memory must be the same everywhere: it decides how products are rounded.
        memory = memory_beside_cache(cache_tokens, config, device, self.dtype)
        prepare(self.model, make, mesh.least(memory))
        tokens = cache_tokens
        if tokens is None:
            tokens = default_cache_tokens(config, device, self.dtype)
            if mesh.backend == "gloo":  # the ranks share this memory
                tokens = max(1, tokens // mesh.world)
        # Who has room for what must be the same everywhere.
        local = PagedRunner(
            self.model, mesh.least(tokens), reuse=reuse, backend=make, warmup=self._warmup
        )
        local.backend.statistics = self._find
        self.capacity, self.kv_cache = local.capacity, local.kv_cache
        return self._kind(local, mesh)

    def _make_session(self, decoder: Decoder, ids: Sequence[int], limit: int | None) -> RankSession:
        return RankSession(self.runner, self.tokenizer, decoder, ids, limit)

    @property
    def round_cost(self) -> RoundCost:
        return given_cost(self._round_cost)

    @property
    def _read_to(self) -> torch.device:
        return self.device if self.mesh.tensors == 1 else torch.device("cpu")
