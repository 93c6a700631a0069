"""What lower precision does to the built-in model's answers, against fp32.

    python measurements/precision.py --out measurements/precision.jsonl [--limit 500]

A line for each task, decoder and precision: accuracy, tokens per forward, the share of answers that
are the same token for token, and of an answer's tokens how many come before the first difference.
Lines that are there already are not made again.
"""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path
from typing import Any

import torch

from lopa import LLM, DecodeConfig
from lopa.evaluation.evaluate import evaluate
from lopa.presets import PAPER
from lopa.tasks import ROOM

# name: dtype, quantize; fp32 first, since the others are held against it
PRECISIONS: dict[str, tuple[str, str | None]] = {
    "fp32": ("float32", None),
    "bf16": ("bfloat16", None),
    "fp8": ("bfloat16", "fp8"),
    "int8": ("bfloat16", "int8"),
}


def same_until(ours: list[int], plain: list[int]) -> float:
    """Share of the plain answer's tokens before the first that differs."""
    pairs = enumerate(zip(ours, plain, strict=False))
    first = next((i for i, (a, b) in pairs if a != b), min(len(ours), len(plain)))
    return first / len(plain)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--limit", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch-size", type=int, default=125)
    parser.add_argument("--precisions", default=",".join(PRECISIONS))
    options = parser.parse_args()
    lines = options.out.read_text().splitlines() if options.out.exists() else []
    done = {tuple(json.loads(x)[n] for n in ("task", "branches", "precision")) for x in lines}
    plain: dict[tuple[str, int], list[list[int]]] = {}
    for precision in options.precisions.split(","):
        dtype, quantize = PRECISIONS[precision]
        llm = LLM(options.model, device=options.device, dtype=dtype, quantize=quantize)
        for task in ("words", "functions"):
            for branches in (0, 7):
                if precision != "fp32" and (task, branches, precision) in done:
                    continue
                report, samples = evaluate(
                    llm,
                    task,
                    DecodeConfig(**PAPER, branches=branches, max_new_tokens=ROOM),
                    split="eval",
                    limit=options.limit,
                    seed=options.seed,
                    batch_size=options.batch_size,
                )
                assert llm.tokenizer is not None
                answers = [llm.tokenizer.encode(sample.text) for sample in samples]
                if precision == "fp32":
                    plain[task, branches] = answers
                if (task, branches, precision) in done:
                    continue
                pairs = list(zip(answers, plain[task, branches], strict=True))
                line: dict[str, Any] = {
                    "task": task,
                    "branches": branches,
                    "precision": precision,
                    "problems": report["problems"],
                    "accuracy": report["accuracy"],
                    "interval": report["interval"],
                    "tpf": report["tpf"],
                    "identical": sum(a == b for a, b in pairs) / len(pairs),
                    "same_until": sum(same_until(a, b) for a, b in pairs) / len(pairs),
                    "device": torch.cuda.get_device_name()
                    if llm.device.type == "cuda"
                    else platform.machine(),
                    "torch": torch.__version__,
                }
                with options.out.open("a") as file:
                    file.write(json.dumps(line) + "\n")
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
