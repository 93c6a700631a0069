"""Host time of the decoder alone: one round at k = 7 over three active blocks of 32.

Prints one line of JSON for each way to accept a branch. The statistics are made up beforehand, so
nothing but the decoder's plan, choose and record is timed; garbage collection is left on, as it is
in a real run. Most rows predict the same token at a position, so that branches agree.

    python measurements/decoder_overhead.py
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from typing import get_args

import numpy as np

from lopa.config import AcceptName, DecodeConfig
from lopa.decoding.decoder import Decoder
from lopa.types import Plan, Stats

MASK, EOS, VOCAB = 151666, 151643, 150000
SAME_SHARE = 0.9  # of a row's tokens, that are those of the other rows


def made_up(rng: np.random.Generator, plan: Plan, fill_share: float) -> Stats:
    shape = int(plan.wanted.sum())
    confident = rng.random(shape) < fill_share
    max_prob = np.where(confident, 0.97, 0.8 * rng.random(shape)).astype(np.float32)
    ranking = np.log(max_prob + 1e-6).astype(np.float32)
    columns = plan.start + plan.wanted.nonzero()[1]
    token = np.where(rng.random(shape) < SAME_SHARE, columns, rng.integers(0, VOCAB, shape))
    return Stats(token, max_prob.astype(np.float64), ranking.astype(np.float64))  # as runners do


def measure(accept: AcceptName, branches: int, runs: int, seed: int) -> list[float]:
    """Seconds of each full round (all branches, three active blocks), over several runs."""
    rng = np.random.default_rng(seed)
    config = DecodeConfig(accept=accept, branches=branches, max_new_tokens=512)
    times = []
    for _ in range(runs):
        prompt = rng.integers(0, VOCAB, 768).tolist()
        decoder = Decoder(config, prompt, mask_id=MASK, eos_ids=[EOS], shift=True)
        while True:
            began = time.perf_counter()
            plan = decoder.plan()
            planned = time.perf_counter() - began
            if plan is None:
                break
            stats = made_up(rng, plan, fill_share=0.08)
            began = time.perf_counter()
            decoder.choose(stats)
            record = decoder.record()
            elapsed = planned + time.perf_counter() - began
            active = sum(block.state in ("semi", "active") for block in record.blocks)
            if active == 3 and len(record.branches) == branches + 1:
                times.append(elapsed)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--branches", type=int, default=7)
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for accept in get_args(AcceptName):
        measure(accept, args.branches, 2, args.seed + 1)  # warm up
        times = 1e3 * np.array(measure(accept, args.branches, args.runs, args.seed))
        found = {
            "accept": accept,
            "branches": args.branches,
            "rounds": len(times),
            "median_ms": round(float(np.median(times)), 4),
            "p95_ms": round(float(np.percentile(times, 95)), 4),
            "python": platform.python_version(),
            "numpy": np.__version__,
            "machine": platform.machine(),
        }
        print(json.dumps(found))


if __name__ == "__main__":
    main()
