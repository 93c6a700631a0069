"""lm-evaluation-harness with this engine, offline, on a local file of ten rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.harness

TASK = """
task: ten_rows
dataset_path: json
dataset_kwargs:
  data_files:
    test: {rows}
test_split: test
output_type: {kind}
doc_to_text: "{{{{prompt}}}}"
{target}
metric_list:
  - metric: {metric}
    aggregation: mean
    higher_is_better: true
"""
GENERATE = """doc_to_target: "{{answer}}"
generation_kwargs:
  until: ["\\n\\n"]
  max_gen_toks: 10
"""
CHOOSE = """doc_to_choice: ["yes", "no"]
doc_to_target: 0
"""


@pytest.mark.parametrize(
    ("kind", "target", "metric"),
    [("generate_until", GENERATE, "exact_match"), ("multiple_choice", CHOOSE, "acc")],
)
def test_their_command(tmp_path: Path, kind: str, target: str, metric: str) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(json.dumps({"prompt": f"{i}+1=", "answer": "?"}) + "\n" for i in range(10))
    )
    text = TASK.format(rows=rows, kind=kind, target=target, metric=metric)
    (tmp_path / "ten_rows.yaml").write_text(text)
    arguments = "model=dummy:dream-tiny,block_size=8,branches=2,draws=2"
    done = subprocess.run(
        [
            *(sys.executable, "-W", "ignore", "-m", "lopa.evaluation.harness"),
            *("--model", "lopa", "--model_args", arguments, "--tasks", "ten_rows"),
            *("--include_path", str(tmp_path), "--output_path", str(tmp_path / "out")),
            *("--batch_size", "4", "--device", "cpu", "--log_samples"),
        ],
        env={**os.environ, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (found,) = (tmp_path / "out").rglob("results_*.json")
    results = json.loads(found.read_text())
    assert results["n-samples"]["ten_rows"]["effective"] == 10
    value = results["results"]["ten_rows"][f"{metric},none"]
    assert value == 0.0 if metric == "exact_match" else 0.0 <= value <= 1.0
