"""What the host does in a round, without a device: the session, the decoder, the batch, its buffer.

    python measurements/host_time.py [--branches 0,3,7,15,auto] [--rounds 120] [--turns 12]

The device's answer is made up and there at once. "Between" is what the device has to wait for, from
its statistics to the start of the next round, less the calls that start it and wait for it;
"meanwhile" is what is left for the time in which it works. `auto` counts forwards, so that it tries
15 branches as well: the difference is its own. Medians of a turn, and of all turns the fastest:
processors are disturbed, and never sped up. The turns of all lines alternate.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch

from lopa import LLM, DecodeConfig
from lopa.config import AUTO_BRANCHES
from lopa.engine.cost_measurement import steady_session
from lopa.engine.scheduler import Scheduler
from lopa.models.transformer import Transformer
from lopa.runner import graph_inputs as layout
from lopa.runner.backend_torch import Found
from lopa.runner.backend_triton import FusedStep
from lopa.runner.batch import Batch
from lopa.runner.kv_cache import Pages
from lopa.runner.paged import PagedRunner
from lopa.types import IntArray


class NoDevice(FusedStep):
    """Lays a batch out as for a graph, and makes the answer up."""

    def __init__(self, model: Transformer, pages: Pages) -> None:
        super().__init__(model, pages)
        self.works_alone = True
        self.draw = np.random.default_rng(0)
        self.bodies: dict[layout.BodySizes, layout.BodyArrays] = {}
        self.heads: dict[layout.HeadSizes, layout.Head[IntArray]] = {}
        self.started = self.answered = 0.0
        self.wanted = 0

    def begin(
        self, batch: Batch, tables: Sequence[IntArray], configs: Sequence[DecodeConfig]
    ) -> None:
        sizes = layout.body_sizes(batch, self._group)
        if sizes not in self.bodies:
            self.bodies[sizes] = layout.BodyArrays(layout.body_buffer(sizes), sizes)
        self.bodies[sizes].fill(batch, None, self._group)
        self.started = time.perf_counter()
        head = layout.head_sizes(batch, configs)
        if head not in self.heads:
            self.heads[head] = layout.head_arrays(layout.head_buffer(head), head)
        layout.fill_head(self.heads[head], batch, configs)
        self.wanted = len(batch.wanted.source)

    def finish(self) -> Found:
        token = self.draw.integers(5, 100, self.wanted)
        max_prob = self.draw.random(self.wanted, np.float32)
        self.answered = time.perf_counter()
        return token, max_prob, -max_prob

    def forward(self, *given: object) -> Found:
        self.begin(*given)  # type: ignore[arg-type]
        return self.finish()

    def commit(self, *given: object) -> None:
        """Of few rounds: left out."""


def measure(llm: LLM, runner: PagedRunner, branches: str, rounds: int) -> tuple[float, float]:
    """Microseconds between two forwards, and meanwhile."""
    step = runner.step
    assert isinstance(step, NoDevice)
    between, meanwhile = [], []
    given: int | Literal["auto"] = "auto" if branches == "auto" else int(branches)
    rows = 1 + (AUTO_BRANCHES[-1] if given == "auto" else given)
    more = {"objective": "tpf"} if given == "auto" else {}
    while len(between) < rounds:
        session = steady_session(llm.config, llm.decode_config, given, 64, 768, **more)
        for event in Scheduler(runner, max_running=1).stream(session):
            ended = time.perf_counter()
            if len(event.round.branches) == rows and step.started > step.answered:
                between.append(step.started - step.answered)
                meanwhile.append(ended - step.started)
    return 1e6 * statistics.median(between), 1e6 * statistics.median(meanwhile)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--branches", default="0,3,7,15,auto")
    parser.add_argument("--rounds", type=int, default=120, help="of a turn")
    parser.add_argument("--turns", type=int, default=12)
    options = parser.parse_args()
    torch.set_num_threads(1)
    llm = LLM("dummy:dream-tiny", device="cpu")
    runner = PagedRunner(llm.model, 4096, step=NoDevice)
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
