"""`lopa bench decode`: tokens per second of whole answers, one by one and many at once."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lopa.config import DecodeConfig
from lopa.engine.base_llm import BaseLLM
from lopa.engine.prompts import Prompt
from lopa.runner.device_timer import DeviceTimer
from lopa.runner.paged import PagedRunner


@dataclass(frozen=True, slots=True)
class DecodeSpeed:
    """Over all prompts together; latencies are of whole answers."""

    prompts: int
    tokens: int
    rounds: int
    tpf: float
    tokens_per_second: float  # first round included
    tokens_per_second_after_first_round: float  # time and tokens of the first round left out
    first_round_ms: float  # median
    later_round_ms: float  # median
    latency_ms_p50: float
    latency_ms_p95: float
    latency_ms_max: float


def measure_decoding(
    llm: BaseLLM,
    prompts: Sequence[Prompt],
    config: DecodeConfig,
    progress: Callable[[int, int], None] | None = None,
) -> DecodeSpeed:
    """Decode the prompts one by one, after one that is not counted.

    Where kernels and graphs are made on the way, each is decoded once before it is timed.
    """
    llm.generate(prompts[0], config)
    outputs = []
    for index, prompt in enumerate(prompts):
        if llm.device.type != "cpu":
            llm.generate(prompt, config)
        outputs.append(llm.generate(prompt, config))
        if progress:
            progress(index + 1, len(prompts))
    tokens, rounds = sum(o.tokens for o in outputs), sum(o.rounds for o in outputs)
    seconds = sum(o.seconds for o in outputs)
    later = [r.seconds for o in outputs for r in o.trace.rounds[1:]]
    first = [o.first_round_seconds for o in outputs]
    first_tokens = sum(len(o.trace.rounds[0].fills) for o in outputs)
    latencies = sorted(1e3 * o.seconds for o in outputs)
    return DecodeSpeed(
        prompts=len(outputs),
        tokens=tokens,
        rounds=rounds,
        tpf=tokens / rounds,
        tokens_per_second=tokens / seconds,
        tokens_per_second_after_first_round=(
            (tokens - first_tokens) / sum(later) if later else 0.0
        ),
        first_round_ms=1e3 * statistics.median(first),
        later_round_ms=1e3 * statistics.median(later) if later else 0.0,
        latency_ms_p50=statistics.median(latencies),
        latency_ms_p95=latencies[min(len(latencies) - 1, int(0.95 * len(latencies)))],
        latency_ms_max=latencies[-1],
    )


@dataclass(frozen=True, slots=True)
class Throughput:
    """Many prompts at once, by the clock on the wall."""

    together: int
    prompts: int
    tokens: int
    rounds: int
    seconds: float
    tokens_per_second: float
    times_one: float  # against one prompt at a time, in the same run
    device_waits: float | None  # share of its time that the device waits; None: not known


def measure_together(
    llm: BaseLLM, prompts: Sequence[Prompt], config: DecodeConfig, together: int, alone: DecodeSpeed
) -> Throughput:
    """The prompts by the engine, `together` at once, after a run that is not counted."""
    runner = getattr(llm, "runner", None)
    backend = runner.backend if isinstance(runner, PagedRunner) and runner.is_async else None
    timer = DeviceTimer(in_flight=2) if backend is not None else None
    try:
        for is_counted in (False, True):
            if backend is not None and is_counted:
                backend.timer = timer
            began = time.perf_counter()
            done = llm.generate_as_completed(prompts, config, max_running=together)
            outputs = [output for _, output in done]
            seconds = time.perf_counter() - began
    finally:
        if backend is not None:
            backend.timer = None
    total = timer.total if timer is not None and timer.total.forward else None
    tokens = sum(o.tokens for o in outputs)
    return Throughput(
        together=together,
        prompts=len(outputs),
        tokens=tokens,
        rounds=sum(o.rounds for o in outputs),
        seconds=seconds,
        tokens_per_second=tokens / seconds,
        times_one=tokens / seconds / alone.tokens_per_second,
        device_waits=total.waited / (total.waited + total.forward) if total else None,
    )
