"""What the host does in a round, without a device: the session, the decoder, the batch, its buffer.

    python measurements/host_time.py [--branches 0,3,7,15,auto] [--rounds 120] [--turns 12]

The device's answer is made up and ready at once. "Between" is what the device waits for, from its
statistics to the launch of the next round, without the calls that launch it and wait for it.
"Meanwhile" is what the host does while the device is busy. `auto` counts forwards, so that it tries
15 branches as well: the difference is its own. Medians of a turn, and the fastest of all turns:
noise only adds time. The turns of all lines alternate.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from functools import partial
from typing import Literal

import numpy as np
import torch

from lopa import LLM, DecodeConfig
from lopa.config import AUTO_BRANCHES
from lopa.engine.cost_measurement import steady_session
from lopa.engine.scheduler import Scheduler
from lopa.models.transformer import Transformer
from lopa.runner import graph_inputs
from lopa.runner.backend_torch import Found, PendingStats
from lopa.runner.backend_triton import TritonBackend
from lopa.runner.batch import Batch
from lopa.runner.kv_cache import KVCache
from lopa.runner.paged import PagedRunner
from lopa.types import IntArray


class NoDevice(TritonBackend):
    """Fills the inputs of graphs, and makes the answer up."""

    def __init__(self, model: Transformer, kv_cache: KVCache) -> None:
        super().__init__(model, kv_cache)
        self.is_async = True
        self.random = np.random.default_rng(0)
        self.layers: dict[graph_inputs.LayerSizes, graph_inputs.HostLayerInputs] = {}
        self.heads: dict[graph_inputs.HeadSizes, graph_inputs.HeadInputs[IntArray]] = {}
        self.started = self.answered = 0.0

    def launch(
        self,
        batch: Batch,
        tables: Sequence[IntArray],
        configs: Sequence[DecodeConfig],
        lane: int = 0,
    ) -> PendingStats:
        sizes = graph_inputs.layer_sizes(batch, self._group)
        if sizes not in self.layers:
            buffer = graph_inputs.layer_buffer(sizes)
            self.layers[sizes] = graph_inputs.HostLayerInputs(buffer, sizes)
        self.layers[sizes].fill(batch, None, self._group)
        self.started = time.perf_counter()
        head = graph_inputs.head_sizes(batch, configs)
        assert head is not None
        if head not in self.heads:
            self.heads[head] = graph_inputs.head_arrays(graph_inputs.head_buffer(head), head)
        graph_inputs.fill_head(self.heads[head], batch, configs)
        return PendingStats(partial(self.answer, len(batch.wanted.source)))

    def answer(self, wanted: int) -> Found:
        token = self.random.integers(5, 100, wanted)
        max_prob = self.random.random(wanted, np.float32)
        self.answered = time.perf_counter()
        return token, max_prob, -max_prob

    def commit(self, *given: object) -> None:
        """Few rounds commit: left out."""


def measure(llm: LLM, runner: PagedRunner, branches: str, rounds: int) -> tuple[float, float]:
    """Microseconds between two forwards, and meanwhile."""
    backend = runner.backend
    assert isinstance(backend, NoDevice)
    between, meanwhile = [], []
    given: int | Literal["auto"] = "auto" if branches == "auto" else int(branches)
    rows = 1 + (AUTO_BRANCHES[-1] if given == "auto" else given)
    more = {"objective": "tpf"} if given == "auto" else {}
    while len(between) < rounds:
        session = steady_session(llm.config, llm.decode_config, given, 64, 768, **more)
        for event in Scheduler(runner, max_running=1).stream(session):
            ended = time.perf_counter()
            if len(event.round.branches) == rows and backend.started > backend.answered:
                between.append(backend.started - backend.answered)
                meanwhile.append(ended - backend.started)
    return 1e6 * statistics.median(between), 1e6 * statistics.median(meanwhile)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--branches", default="0,3,7,15,auto")
    parser.add_argument("--rounds", type=int, default=120, help="of a turn")
    parser.add_argument("--turns", type=int, default=12)
    options = parser.parse_args()
    torch.set_num_threads(1)
    llm = LLM("dummy:dream-tiny", device="cpu")
    runner = PagedRunner(llm.model, 4096, backend=NoDevice)
    lines = options.branches.split(",")
    turns = [
        [measure(llm, runner, branches, options.rounds) for branches in lines]
        for _ in range(options.turns)
    ]
    for branches, found in zip(lines, zip(*turns, strict=True), strict=True):
        between, meanwhile = map(min, zip(*found, strict=True))
        print(f"k = {branches}: between {between:.0f} µs, meanwhile {meanwhile:.0f} µs")


if __name__ == "__main__":
    main()
