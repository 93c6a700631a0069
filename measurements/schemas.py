"""Every made-up schema with every setting: do all answers fit?

    python measurements/schemas.py [--processes 8] [--schemas 300] [--json FILE]

300 schemas × built-in model and random weights × 0, 3 and 7 branches × temperature 0 and 1 × 1 and
2 ranks, the windows in rotation: each answer is parsed and validated. `make test-schemas` decodes
each schema with one of these settings. On the CPU in fp32, in so many processes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(HERE / "tests" / folder) for folder in ("engine", "grammar")]

from schema_cases import BRANCHES, TEMPERATURES, WINDOWS, check_schemas, random_model  # noqa: E402

from lopa import LLM  # noqa: E402
from lopa.distributed.parallel_llm import ParallelLLM  # noqa: E402
from lopa.engine.base_llm import BaseLLM  # noqa: E402

CHUNK = 25  # schemas that are decoded together
TURNS = len(BRANCHES) * len(TEMPERATURES)
MODELS, RANKS = ("random", "tiny"), (1, 2)

Job = tuple[str, str, int, int, int, int]  # model, its place, ranks, turn, first, end


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--schemas", type=int, default=300)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    began, found = time.monotonic(), dict.fromkeys(((m, r) for m in MODELS for r in RANKS), 0)
    with tempfile.TemporaryDirectory() as folder:
        places = {"random": str(random_model(Path(folder))), "tiny": "tiny"}
        jobs: list[Job] = [
            (model, places[model], ranks, turn, first, min(first + CHUNK, options.schemas))
            for first in range(0, options.schemas, CHUNK)
            for turn in range(TURNS)
            for model in MODELS
            for ranks in RANKS
        ]
        with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
            for done, (key, answers) in enumerate(pool.imap_unordered(_decode, jobs), 1):
                found[key] += answers
                print(f"{done}/{len(jobs)} after {time.monotonic() - began:.0f} s", file=sys.stderr)
    for (model, ranks), answers in found.items():
        print(f"{model}, {ranks} ranks: {answers} answers, all of them fit")
    if options.json is not None:
        answers_of = [{"model": m, "ranks": r, "answers": n} for (m, r), n in found.items()]
        options.json.write_text(json.dumps(answers_of, indent=1))


def _decode(job: Job) -> tuple[tuple[str, int], int]:
    """Fails where an answer does not fit. How many answers there were."""
    model, place, ranks, turn, first, end = job
    llm: BaseLLM
    if ranks == 1:
        llm = LLM(place, device="cpu", dtype="float32")
    else:
        llm = ParallelLLM(place, branch_parallel=ranks, device="cpu", dtype="float32")
    try:
        # Six numbers further on: the same window, the next branches or temperature
        answers = check_schemas(llm, range(first, end), offset=first + len(WINDOWS) * turn)
    finally:
        if isinstance(llm, ParallelLLM):
            llm.close()
    return (model, ranks), answers


if __name__ == "__main__":
    main()
