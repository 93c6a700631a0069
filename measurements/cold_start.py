"""Seconds until the first answer on a GPU: from nothing, warm, and after `lopa warmup`.

    PYTHONPATH=src python3 measurements/cold_start.py [--model M] [--dtype D] [--quantize Q]

Each run is a process with its own folders of compiled kernels and of kept costs, so the user's are
neither used nor touched. It prints a table of seconds, a line a run, and the kernels that a run
compiled, with the seconds of each beside others. Late kernels are those that the first rounds had
to compile themselves. Without a GPU it measures the same, with nothing to compile.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROMPT = "Tom has 3 apples and buys 4 more. How many apples does Tom have?\n"
# start: Python; device: its first use; runner: caches and what noting kernels takes; answer: the
# first one; next: the same again; first: all up to the first answer; all: until the process ends
PHASES = "start torch lopa device load weights runner compile cost graphs answer next first all"
LISTED = 40  # kernels


def child(options: dict[str, Any]) -> None:
    """One answer, by phases; a line of JSON."""
    seconds = {"start": time.time() - float(os.environ["COLD_START_BEGAN"])}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        found = work()
        seconds[name] = time.perf_counter() - began
        return found

    from lopa.kernels import triton_start

    triton_start.begin_if_gpu()
    torch = timed("torch", lambda: __import__("torch"))
    timed("lopa", lambda: __import__("lopa.engine.llm"))
    on_gpu = torch.cuda.is_available()
    timed("device", lambda: torch.zeros(8, device="cuda" if on_gpu else "cpu") + 1)
    late: list[tuple[str, float, None]] = []
    if on_gpu:
        from triton import knobs

        def listen(*, src: Any, times: Any, cache_hit: bool, **_: Any) -> None:
            if threading.current_thread() is threading.main_thread():
                late.append((f"{src.name}{' from disk' * cache_hit}", times.total / 1e6, None))

        knobs.compilation.listener = listen
    from lopa.engine import loader
    from lopa.engine.llm import LLM

    for name, function in (("weights", "load_weights"), ("runner", "make_runner")):
        real = getattr(loader, function)

        def wrapped(*given: Any, real: Any = real, name: str = name, **more: Any) -> Any:
            return timed(name, functools.partial(real, *given, **more))

        setattr(loader, function, wrapped)
    compiling: list[float] = []
    llm = timed(
        "load",
        lambda: LLM(**options, compiling=lambda *_: compiling.append(time.perf_counter())),
    )
    seconds["compile"] = compiling[-1] - compiling[0] if compiling else 0.0
    seconds["load"] -= seconds["weights"] + seconds["runner"]
    seconds["runner"] -= seconds["compile"]
    timed("cost", lambda: llm.round_cost)
    config = llm.decode_config(branches="auto", max_new_tokens=64)
    ids = llm.encode(PROMPT) if llm.tokenizer is not None else list(range(2, 34))
    output = timed("answer", lambda: llm.generate(ids, config))
    seconds["first"] = sum(seconds.values())
    again = timed("next", lambda: llm.generate(ids, config))
    found = {
        "seconds": seconds,
        "kernels": [tuple(one) for one in llm.runner.compiled],
        "late": late,
        "text": output.text[:40],
        "same": output.token_ids == again.token_ids,
        "rate": again.tokens_per_second,
        "device": torch.cuda.get_device_name() if on_gpu else str(llm.device),
    }
    print(json.dumps(found))


def run(command: list[str], folder: Path, limit: float) -> tuple[float, str, str]:
    environment = {
        **os.environ,
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "LOPA_CACHE_DIR": str(folder / "lopa"),
        "PYTHONPATH": os.pathsep.join(filter(None, ["src", os.environ.get("PYTHONPATH")])),
        "COLD_START_BEGAN": str(time.time()),
    }
    began = time.perf_counter()
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=limit, check=False
        )
    except subprocess.TimeoutExpired:
        return limit, "", f"nothing within {limit:g} s"
    seconds = time.perf_counter() - began
    if done.returncode:
        return seconds, "", "\n".join(done.stderr.splitlines()[-12:])
    return seconds, done.stdout, done.stderr


def report(name: str, command: list[str], folder: Path, limit: float) -> bool:
    """A line of the table, and the kernels; whether it went well."""
    seconds, out, error = run(command, folder, limit)
    try:
        found = json.loads(out.splitlines()[-1])
    except (IndexError, ValueError):
        print(f"{name:14}FAILED after {seconds:.1f} s: {error or out[-300:]}", flush=True)
        return False
    phases = found.get("seconds")
    parts = {**(phases if isinstance(phases, dict) else {}), "all": seconds}
    cells = (f"{parts[part]:8.2f}" if part in parts else " " * 8 for part in PHASES.split())
    print(f"{name:14}{''.join(cells)}", flush=True)
    for kind in ("kernels", "late"):
        kernels = sorted(found.get(kind, []), key=lambda one: -one[1])
        if kernels:
            each = (f"{k} {s:.2f}{f' FAILED: {e}' if e else ''}" for k, s, e in kernels[:LISTED])
            title = "kernels" if kind == "kernels" else "late kernels"
            print(f"    {len(kernels)} {title}: {', '.join(each)}", flush=True)
    if "text" in found and "rate" in found:
        print(
            f"    {found['device']}: {found['text']!r}, again the same: {found['same']}, "
            f"{found['rate']:.0f} tokens/s",
            flush=True,
        )
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--dtype")
    parser.add_argument("--quantize")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for each run")
    parser.add_argument("--only", help="names of runs to do, separated by commas")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    options = {k: v for k in ("model", "dtype", "quantize") if (v := getattr(given, k)) is not None}
    if given.child:
        child(options)
        return 0
    arguments = [f"--{name}={value}" for name, value in options.items()]
    answer = [sys.executable, __file__, "--child", *arguments]
    lopa = [sys.executable, "-m", "lopa"]
    ready = [*lopa, "warmup", "--json", *arguments]
    generate = [*lopa, "generate", PROMPT, "--json", "--max-new-tokens=64", *arguments]
    runs = (
        ("cold", answer, "cold"),
        ("warm", answer, "cold"),
        ("lopa warmup", ready, "ready"),
        ("after warmup", answer, "ready"),
        ("generate cold", generate, "generate"),
        ("generate warm", generate, "generate"),
    )
    print(" " * 14 + "".join(f"{name:>8}" for name in PHASES.split()), flush=True)
    went_well = True
    with tempfile.TemporaryDirectory(prefix="cold-start-") as temporary:
        for name, command, folder in runs:
            if given.only is None or name in given.only.split(","):
                went_well &= report(name, command, Path(temporary) / folder, given.limit)
    return 0 if went_well else 1


if __name__ == "__main__":
    sys.exit(main())
