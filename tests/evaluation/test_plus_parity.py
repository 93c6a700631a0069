"""EvalPlus from its own command on the same ten rows: the same answers pass."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lopa.evaluation.public import benchmark
from lopa.evaluation.rows import read_rows

pytestmark = [pytest.mark.harness, pytest.mark.filterwarnings("ignore")]

ROWS = Path(__file__).parent / "rows" / "plus.jsonl"


def test_their_command(tmp_path: Path) -> None:
    name = "humaneval+"
    rows = read_rows(ROWS, name, ())
    answers = [row["canonical_solution"] for row in rows]
    answers[1] = "    return n\n"  # wrong
    answers[4] = "    return n // 2 if n == 0 else n / 2 + 1e-12\n"  # near enough for a float
    answers[7] = "    return list(range(n)) if n < 100 else None\n"  # wrong on a test of plus alone
    answers[8] = "    import numpy\n    return int(numpy.maximum(n, 0))\n"
    exercises = benchmark(name, chat=False, data=ROWS).exercises
    ours = [exercise.score(text) for exercise, text in zip(exercises, answers, strict=True)]
    assert [s["plus"] for s in ours] == [i not in (1, 7) for i in range(10)]
    assert [s["base"] for s in ours] == [i != 1 for i in range(10)]

    samples = tmp_path / "samples.jsonl"
    solutions = (
        {"task_id": row["task_id"], "solution": row["prompt"] + text}
        for row, text in zip(rows, answers, strict=True)
    )
    samples.write_text("".join(json.dumps(line) + "\n" for line in solutions))
    dataset = name.removesuffix("+")
    local = {f"{d}_OVERRIDE_PATH": str(ROWS) for d in ("HUMANEVAL", "MBPP")}
    command = [sys.executable, "-W", "ignore", "-m", "evalplus.evaluate", "--dataset", dataset]
    done = subprocess.run(
        [*command, "--samples", str(samples), "--parallel", "2"],
        env={**os.environ, **local, "XDG_CACHE_HOME": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads((tmp_path / "samples_eval_results.json").read_text())["eval"]
    results = [found[row["task_id"]][0] for row in rows]
    assert [r["base_status"] == "pass" for r in results] == [s["base"] for s in ours]
    both = [r["base_status"] == r["plus_status"] == "pass" for r in results]
    assert both == [s["plus"] for s in ours]
