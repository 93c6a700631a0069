"""A large run without a model: 512 tokens, 15 branches, made-up statistics, a real decoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from lopa import trace
from lopa.config import DecodeConfig
from lopa.decoding.decoder import Decoder
from lopa.types import Plan, Stats, Trace

MASK, EOS, VOCAB = 999, 998, 400


def large_trace(path: Path, tokens: int = 512, branches: int = 15, **options: Any) -> Trace:
    rng = np.random.default_rng(0)
    config = DecodeConfig(branches=branches, max_new_tokens=tokens, early_stop=False, **options)
    prompt = rng.integers(0, VOCAB, 96).tolist()
    decoder = Decoder(config, prompt, mask_id=MASK, eos_ids=[EOS], shift=True)
    made = Trace(prompt, config.settings())
    while (plan := decoder.plan()) is not None:
        decoder.choose(_stats(rng, plan))
        record = decoder.record()
        record.seconds = 0.01
        made.rounds.append(record)
    made.token_ids = decoder.generated.tolist()
    made.finish = decoder.finish
    made.pieces = {token: f" w{token}" for token in range(VOCAB)}
    trace.write(made, path)
    return made


def _stats(rng: np.random.Generator, plan: Plan) -> Stats:
    shape = int(plan.wanted.sum())
    confident = rng.random(shape) < 0.04
    max_prob = np.where(confident, 0.97, 0.85 * rng.random(shape)).astype(np.float32)
    return Stats(rng.integers(0, VOCAB, shape), max_prob, np.log(max_prob + 1e-6))
