"""Seconds until the first answer on a GPU: from nothing, warm, and after `lopa warmup`.

    PYTHONPATH=src python3 measurements/cold_start.py [--model M] [--dtype D] [--quantize Q]

Each run is a process of its own with its own folders of compiled kernels and of kept costs, so that
the user's are neither used nor touched. It prints a table, and the kernels that the cold run and
the warmup compiled, with the seconds that each took beside others. Without a GPU it measures the
same, with nothing to compile.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PROMPT = "Tom has 3 apples and buys 4 more. How many apples does Tom have?\n"
# answer: the first one; next: the same again; inside: up to the first answer; all: of the process
PHASES = ("import", "load", "compile", "cost", "graphs", "answer", "next", "inside", "all")


def child(options: dict[str, Any]) -> None:
    """One answer, by phases; a line of JSON."""
    marks = [("", time.perf_counter())]

    def mark(name: str) -> None:
        marks.append((name, time.perf_counter()))

    import torch

    from lopa.engine.llm import LLM

    mark("import")
    began_compiling: list[float] = []
    llm = LLM(
        **options,
        compiling=lambda done, total: began_compiling.append(time.perf_counter()),
    )
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    mark("load")
    _ = llm.round_cost
    mark("cost")
    config = llm.decode_config(branches="auto", max_new_tokens=64)
    ids = llm.encode(PROMPT) if llm.tokenizer is not None else list(range(2, 34))
    output = llm.generate(ids, config)
    mark("answer")
    again = llm.generate(ids, config)
    mark("next")
    seconds = {b[0]: b[1] - a[1] for a, b in itertools.pairwise(marks)}
    seconds["compile"] = began_compiling[-1] - began_compiling[0] if began_compiling else 0.0
    seconds["load"] -= seconds["compile"]
    seconds["inside"] = marks[-2][1] - marks[0][1]
    print(
        json.dumps(
            {
                "seconds": seconds,
                "kernels": [tuple(one) for one in llm.runner.compiled],
                "text": output.text[:60],
                "same": output.token_ids == again.token_ids,
                "device": str(llm.device),
            }
        )
    )


def run(command: list[str], folder: Path, limit: float) -> tuple[float, str, str]:
    environment = {
        **os.environ,
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "LOPA_CACHE_DIR": str(folder / "lopa"),
        "PYTHONPATH": os.pathsep.join(["src", os.environ.get("PYTHONPATH", "")]).rstrip(":"),
    }
    began = time.perf_counter()
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=limit, check=False
        )
    except subprocess.TimeoutExpired:
        return limit, "", f"no answer within {limit:g} s"
    seconds = time.perf_counter() - began
    if done.returncode:
        return seconds, "", "\n".join(done.stderr.splitlines()[-8:])
    return seconds, done.stdout, done.stderr


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--dtype")
    parser.add_argument("--quantize")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds for each run")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    options = {k: v for k in ("model", "dtype", "quantize") if (v := getattr(given, k)) is not None}
    if given.child:
        child(options)
        return 0
    arguments = [f"--{name}={value}" for name, value in options.items()]
    here = [sys.executable, __file__, "--child", "yes", *arguments]
    lopa = [sys.executable, "-m", "lopa"]
    failed = False
    with tempfile.TemporaryDirectory(prefix="cold-start-") as temporary:
        cold, ready = Path(temporary) / "cold", Path(temporary) / "ready"
        print(f"{'':14}" + "".join(f"{name:>9}" for name in PHASES), flush=True)

        def report(name: str, command: list[str], folder: Path) -> None:
            nonlocal failed
            seconds, out, err = run(command, folder, given.limit)
            try:
                found = json.loads(out.splitlines()[-1])
            except (IndexError, ValueError):
                failed = True
                print(f"{name:14} FAILED after {seconds:.1f} s: {err}", flush=True)
                return
            parts = {**found.get("seconds", {}), "all": seconds}
            cells = (f"{parts[p]:9.2f}" if p in parts else f"{'':9}" for p in PHASES)
            print(f"{name:14}" + "".join(cells), flush=True)
            kernels = sorted(found.get("kernels", []), key=lambda one: -one[1])
            if kernels and name in ("cold", "lopa warmup"):
                listed = ", ".join(
                    f"{k} {s:.2f}{' FAILED ' + e if e else ''}" for k, s, e in kernels
                )
                print(f"    {len(kernels)} kernels: {listed}", flush=True)
            if "text" in found:
                print(f"    {found['device']}: {found['text']!r}, again the same: {found['same']}")

        report("cold", here, cold)
        report("warm", here, cold)
        report("lopa warmup", [*lopa, "warmup", "--json", *arguments], ready)
        report("after warmup", here, ready)
        command = [*lopa, "generate", PROMPT, "--json", *arguments]
        for name, folder in (
            ("generate cold", Path(temporary) / "cli"),
            ("generate warm", Path(temporary) / "cli"),
        ):
            seconds, out, err = run(command, folder, given.limit)
            print(f"{name:14}{'':81}{seconds:9.2f}{'' if out else '  FAILED: ' + err}", flush=True)
            failed |= not out
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
