"""Accuracy against tokens per forward on the built-in tasks, setting by setting.

Appends one JSON line per setting to --out and skips those already there, so a run that was
stopped goes on where it was. Several processes share the device. Needs nothing but the package.

    python measurements/tradeoff.py --model tiny --out measurements/tradeoff.jsonl
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from multiprocessing import get_context
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

from lopa.presets import PAPER
from lopa.tasks import ROOM

BRANCHES = (7, 0, 3, 1, 14)
THRESHOLDS = (0.9, 0.8, 0.95)
ATTENTIONS = ("full", "block")
FLOORS = (0.0, 0.3)
TASKS = ("words", "functions")


def grid() -> list[dict[str, Any]]:
    """Every setting to measure, the most telling first."""
    jobs: list[dict[str, Any]] = []

    def add(task: str, split: str, **options: Any) -> None:
        job = {"task": task, "split": split, "options": {"max_new_tokens": ROOM, **options}}
        if job not in jobs:
            jobs.append(job)

    for split in ("eval", "held-out"):
        for task in TASKS:
            for attention in ATTENTIONS:
                # Never above the threshold, one block forced at a time: one token per round.
                one = {"decoder": "d2f", "threshold": 1.0, "activate_at": 1.0}
                add(task, split, attention=attention, **one)
                for k in (0, 7):
                    add(task, split, decoder="lopa", branches=k, threshold=0.9, attention=attention)
    for threshold in THRESHOLDS:
        for k in BRANCHES:
            for floor in FLOORS if k else (0.0,):
                for attention in ATTENTIONS:
                    for task in TASKS:
                        options: dict[str, Any] = {"branches": k, "threshold": threshold}
                        if floor:
                            options["lookahead_floor"] = floor
                        add(task, "eval", decoder="lopa", attention=attention, **options)
    for task in TASKS:
        add(task, "eval", decoder="vanilla")
        add(task, "eval", decoder="fast-dllm", threshold=0.9)
    return jobs


def as_published(options: dict[str, Any]) -> dict[str, Any]:
    """The options, looking ahead as the paper does where they do not say otherwise."""
    return {**PAPER, **options} if options["decoder"] == "lopa" else options


def work(args: argparse.Namespace, jobs: Queue[Any], results: Queue[Any]) -> None:
    import torch

    from lopa import LLM, DecodeConfig
    from lopa.evaluation.evaluate import evaluate

    torch.set_num_threads(1)
    llm = LLM(args.model, device=args.device, dtype="float32")
    while (job := jobs.get()) is not None:
        report, _ = evaluate(
            llm,
            job["task"],
            DecodeConfig(**as_published(job["options"])),
            split=job["split"],
            limit=args.limit,
            seed=args.seed,
            batch_size=args.batch_size,
        )
        results.put(job | {"report": report})
    results.put(None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no setting after this")
    args = parser.parse_args()

    began = time.monotonic()
    done = []
    if args.out.exists():
        done = [json.loads(line) for line in args.out.read_text().splitlines()]
    known = [{k: d[k] for k in ("task", "split", "options")} for d in done]
    todo = [job for job in grid() if job not in known]
    context = get_context("spawn")
    jobs: Queue[Any] = context.Queue(maxsize=1)  # so that a stop is not behind a long queue
    results: Queue[Any] = context.Queue()
    workers = [
        context.Process(target=work, args=(args, jobs, results), daemon=True)
        for _ in range(args.workers)
    ]
    for worker in workers:
        worker.start()
    pending: list[dict[str, Any] | None] = [*todo, *[None] * len(workers)]
    alive = len(workers)
    with args.out.open("a") as out:
        while alive:
            if (time.monotonic() - began) / 60 > args.minutes:
                pending = [job for job in pending if job is None]
            if pending and not jobs.full():
                jobs.put(pending.pop(0))
            if not any(worker.is_alive() for worker in workers) and results.empty():
                sys.exit("every worker has died: see the messages above")
            if results.empty():
                time.sleep(0.05)
                continue
            found = results.get()
            if found is None:
                alive -= 1
                continue
            report = found["report"]
            out.write(json.dumps(found | {"host": host(args)}) + "\n")
            out.flush()
            os.fsync(out.fileno())
            print(
                f"{time.monotonic() - began:6.0f} s {found['task']:9} {found['split']:8} "
                f"acc {report['accuracy']:.3f} tpf {report['tpf']:5.2f} "
                f"rounds {report['rounds']:6d} {report['seconds']:6.1f} s  "
                f"{ {k: v for k, v in found['options'].items() if k != 'max_new_tokens'} }",
                flush=True,
            )


def host(args: argparse.Namespace) -> dict[str, Any]:
    import torch

    cuda = torch.cuda.is_available() and args.device != "cpu"
    return {
        "device": torch.cuda.get_device_name() if cuda else platform.machine(),
        "torch": torch.__version__,
        "dtype": "float32",
    }


if __name__ == "__main__":
    main()
