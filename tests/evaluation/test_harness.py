"""lm-evaluation-harness's own command with this engine, offline, on local files of ten rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.harness, pytest.mark.filterwarnings("ignore")]

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
    results = theirs(tmp_path, text, "model=dummy:dream-tiny,block_size=8,branches=2,draws=2")
    value = results[f"{metric},none"]
    assert value == 0.0 if metric == "exact_match" else 0.0 <= value <= 1.0


def test_their_tasks(tmp_path: Path) -> None:
    """Examples as turns of a chat; code without code_eval's download."""
    chat = ("--apply_chat_template", "--fewshot_as_multiturn", "true")
    room = "model=tiny,max_new_tokens=8,block_size=4"
    results = theirs(tmp_path / "chat", local("gsm8k", "fewshot_split: test"), room, *chat)
    assert results["exact_match,strict-match"] == 0.0
    unsafe = ("--confirm_run_unsafe_code",)
    room = "model=dummy:dream-tiny,max_new_tokens=8,block_size=4"
    results = theirs(tmp_path / "code", local("humaneval"), room, *unsafe)
    assert results["pass@1,create_test"] == 0.0


def local(name: str, more: str = "") -> str:
    """A task of the harness on ten rows of our own."""
    import lm_eval.tasks

    path = Path(lm_eval.tasks.__file__).parent / name / f"{name}.yaml"
    rows = Path(__file__).parent / "rows" / f"{name}.jsonl"
    files = f"dataset_kwargs:\n  data_files:\n    test: {rows}\n"
    return f"include: {path}\ntask: ten_rows\ndataset_path: json\ndataset_name: null\n{files}{more}"


def theirs(folder: Path, task: str, arguments: str, *more: str) -> dict[str, Any]:
    """What the harness's command says of a task."""
    folder.mkdir(exist_ok=True)
    (folder / "ten_rows.yaml").write_text(task)
    done = subprocess.run(
        [
            *(sys.executable, "-W", "ignore", "-m", "lopa.evaluation.harness"),
            *("--model", "lopa", "--model_args", arguments, "--tasks", "ten_rows"),
            *("--include_path", str(folder), "--output_path", str(folder / "out")),
            *("--batch_size", "4", "--device", "cpu", "--log_samples", *more),
        ],
        env={**os.environ, "HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (found,) = (folder / "out").rglob("results_*.json")
    results = json.loads(found.read_text())
    assert results["n-samples"]["ten_rows"]["effective"] == 10
    values: dict[str, Any] = results["results"]["ten_rows"]
    return values
