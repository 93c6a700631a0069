"""`lopa bench parallel`: where the time of a round goes, on every rank, and what is sent."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass

import numpy as np
import torch

from lopa.bench.ceilings import synchronize
from lopa.config import DecodeConfig
from lopa.distributed.rank_llm import RankLLM
from lopa.engine.prompts import Prompt
from lopa.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RankTime:
    """Means over the rounds with all branches, in milliseconds."""

    round_ms: float
    forward_ms: float
    idle_ms: float  # waiting for the last rank
    gather_ms: float  # packing, the all-gather once everybody is there, unpacking
    commit_ms: float  # the broadcast, where there is one, and the cache, if not by the next forward
    host_ms: float  # the decoder and everything else

    @property
    def protocol_share(self) -> float:
        """Of the round: gather and commit, of which one device has the commit as well."""
        return (self.gather_ms + self.commit_ms) / self.round_ms

    @property
    def parts(self) -> tuple[float, ...]:
        return self.forward_ms, self.idle_ms, self.gather_ms, self.commit_ms, self.host_ms


@dataclass(frozen=True, slots=True)
class ParallelTime:
    branch_parallel: int
    tensor_parallel: int
    rounds: int
    median_round_ms: float  # of rank 0
    statistics_bytes: int  # that all ranks together send in a round, at most
    commit_bytes: int  # of all broadcasts, each buffer counted once
    commits: int  # broadcasts
    ranks: list[RankTime]


def measure_ranks(
    llm: RankLLM, prompts: Sequence[Prompt], config: DecodeConfig, rounds: int
) -> ParallelTime:
    """Decode the prompts, after one that is not counted, for so many rounds at most.

    Idle time is told by the ranks' clocks: they must be of one machine.
    """
    mesh, runner = llm.mesh, llm.runner
    llm.generate(prompts[0], config)
    if config.branches == "auto":
        raise ConfigError("rounds of one size are compared: give a number of branches, not auto")
    lines: list[tuple[float, ...]] = []
    sent, moved, commits = 0, 0, 0
    for prompt in prompts:
        with closing(llm.engine(max_running=1)) as engine:
            events = engine.stream(llm.session(prompt, config))
            while len(lines) < rounds:
                synchronize(llm.device)
                began = time.perf_counter()
                event = next(events, None)
                synchronize(llm.device)
                whole = time.perf_counter() - began
                if event is None:
                    break
                if len(event.round.branches) == config.branches + 1:
                    spent = runner.spent
                    parts = spent.forward, spent.idle, spent.gather, spent.commit
                    lines.append((whole, *parts, whole - sum(parts)))
                    sent = max(sent, spent.statistics_bytes)
                    moved += spent.commit_bytes
                    commits += spent.commits
    if not lines:
        raise ConfigError(
            f"no round had all {config.branches} branches: ask for fewer, or more new tokens"
        )
    times = np.array(lines)
    mean = 1e3 * times.mean(axis=0)
    everyone = mesh.gather(torch.from_numpy(mean.view(np.uint8))).numpy().view(np.float64)
    ranks = [RankTime(*row.tolist()) for row in everyone]
    return ParallelTime(
        branch_parallel=mesh.branch_parallel,
        tensor_parallel=mesh.tensor_parallel,
        rounds=len(lines),
        median_round_ms=1e3 * float(np.median(times[:, 0])),
        statistics_bytes=sent,
        commit_bytes=moved,
        commits=commits,
        ranks=ranks,
    )


def as_dict(found: ParallelTime) -> dict[str, object]:
    shares = [rank.protocol_share for rank in found.ranks]
    return {**asdict(found), "protocol_shares": shares}
