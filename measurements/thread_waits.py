"""How OpenMP's threads wait, and what that costs a round on an idle and on a busy CPU.

    python measurements/thread_waits.py --busy 0 1 2

A thread that has done its part of an operation spins for the others, or sleeps. Spinning is faster
while every thread has a core of its own; beside other processes it keeps the thread that is waited
for from running. Each setting has a process of its own, and they take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

SETTINGS: dict[str, dict[str, str]] = {
    "1 thread": {"OMP_NUM_THREADS": "1"},
    "spinning (the runtime's default)": {},
    "GOMP_SPINCOUNT=10000": {"GOMP_SPINCOUNT": "10000"},
    "GOMP_SPINCOUNT=1000": {"GOMP_SPINCOUNT": "1000"},
    "OMP_WAIT_POLICY=passive": {"OMP_WAIT_POLICY": "passive"},
}
ROUNDS = 6
OURS = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def serve(branches: int) -> None:
    """A process of one setting: a line in, the median seconds of some rounds out."""
    from lopa import LLM
    from lopa.tasks import generate

    llm = LLM("tiny", device="cpu")
    prompt = generate("words", 3, "eval").prompt
    for line in sys.stdin:
        config = llm.decode_config(branches=branches, max_new_tokens=64, max_rounds=int(line))
        output = llm.generate(prompt, config)
        print(statistics.median(r.seconds for r in output.trace.rounds[1:]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 1, 2], help="other processes")
    parser.add_argument("--branches", type=int, nargs="+", default=[0, 7])
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--serve", type=int)
    options = parser.parse_args()
    if options.serve is not None:
        serve(options.serve)
        return
    clean = {name: value for name, value in os.environ.items() if name not in OURS}
    for branches in options.branches:
        command = (sys.executable, __file__, "--serve", str(branches))
        workers = {
            name: subprocess.Popen(
                command,
                env={**clean, **more},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for name, more in SETTINGS.items()
        }
        for worker in workers.values():
            ask(worker)  # loaded and warm
        for busy in options.busy:
            burners = [
                subprocess.Popen((sys.executable, "-c", "while True: pass")) for _ in range(busy)
            ]
            time.sleep(0.2)
            found: dict[str, list[float]] = {name: [] for name in workers}
            for _ in range(options.turns):
                for name, worker in workers.items():
                    found[name].append(ask(worker))
            for burner in burners:
                burner.kill()
                burner.wait()
            said = {
                "branches": branches,
                "busy": busy,
                "median_ms": {n: round(1e3 * statistics.median(s), 1) for n, s in found.items()},
                "fastest_ms": {n: round(1e3 * min(s), 1) for n, s in found.items()},
            }
            print(json.dumps(said), flush=True)
        for worker in workers.values():
            worker.communicate()


def ask(worker: subprocess.Popen[str]) -> float:
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write(f"{ROUNDS}\n")
    worker.stdin.flush()
    return float(worker.stdout.readline())


if __name__ == "__main__":
    main()
