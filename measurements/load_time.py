"""Where a round's time goes with many requests at once: the host, its records, the device.

    python measurements/load_time.py [--task words] [--at-once 1,8,32] [--limit 128] [--turns 3]

Microseconds of a round, by session. "Host" is what the device waits for, "records" what the host
does while the device works, "wait" is what the host waits for the device. The turns of all numbers
of branches alternate, and the median of each figure counts. The growth of host and records over
no branches is where HOST_GROWTH (engine/cost_measurement.py) comes from.
"""

from __future__ import annotations

import argparse
import statistics
import time

from lopa import LLM
from lopa.bench import gc_frozen
from lopa.config import AUTO_BRANCHES, DecodeConfig
from lopa.engine.base import MAX_RUNNING
from lopa.evaluation import evaluate
from lopa.tasks import ROOM
from markdown_sections import table

SETTINGS = (*map(str, AUTO_BRANCHES), "auto")


def measure(llm: LLM, prompts: list[str], config: DecodeConfig, at_once: int) -> dict[str, float]:
    """Microseconds of a round, by session; tokens per second and per forward; branches."""
    engine = llm.engine(max_running=min(at_once, MAX_RUNNING))
    for prompt in prompts:
        engine.add(llm.session(prompt, config))
    rounds = tokens = branches = 0
    host = records = 0.0
    began = time.perf_counter()
    while engine.busy:
        for _, event in engine.step():
            rounds += 1
            branches += len(event.round.branches) - 1
            tokens += event.output.tokens if event.output else 0
        host, records = host + engine.host_seconds, records + engine.record_seconds
    seconds = time.perf_counter() - began
    each = 1e6 / rounds
    return {
        "tokens/s": tokens / seconds,
        "TPF": tokens / rounds,
        "branches": branches / rounds,
        "round": each * seconds,
        "host": each * host,
        "records": each * records,
        "wait": each * (seconds - host - records),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", default="words")
    parser.add_argument("--at-once", default="1,8,32")
    parser.add_argument("--limit", type=int, default=128)
    parser.add_argument("--seed", type=int, default=31)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    llm = LLM("tiny", device=options.device, dtype=options.dtype)
    problems = evaluate.problems(options.task, "eval", options.limit, options.seed)
    prompts = [problem.prompt for problem in problems]
    configs = {
        setting: llm.decode_config(
            max_new_tokens=ROOM, branches="auto" if setting == "auto" else int(setting)
        )
        for setting in SETTINGS
    }
    lines: list[list[str]] = []
    heads: list[str] = []
    for at_once in map(int, options.at_once.split(",")):
        found: dict[str, list[dict[str, float]]] = {setting: [] for setting in SETTINGS}
        for turn in range(options.turns + 1):
            for setting, config in configs.items():
                with gc_frozen.frozen():
                    one = measure(llm, prompts, config, at_once)
                if turn:  # the first captures graphs
                    found[setting].append(one)
        plain = 0.0
        for setting, turns in found.items():
            figures = {name: statistics.median(t[name] for t in turns) for name in turns[0]}
            own = figures["host"] + figures["records"]
            plain = plain or own
            heads = ["at once", "k", *figures, "growth"]
            values = [f"{value:.{0 if value >= 20 else 2}f}" for value in figures.values()]
            lines.append([str(at_once), setting, *values, f"{own / plain:.2f}"])
    print(table(heads, lines))


if __name__ == "__main__":
    main()
