"""lm-evaluation-harness's own command with this engine, offline, on local files of ten rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lopa.models.files import BUILT_IN

pytestmark = [pytest.mark.harness, pytest.mark.filterwarnings("ignore")]

TASK = """
task: {name}
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


def test_answers_likelihoods_and_code(tmp_path: Path) -> None:
    """Code is scored without the download of its metric."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(json.dumps({"prompt": f"{i}+1=", "answer": "?"}) + "\n" for i in range(10))
    )
    wanted = {
        "told": ("generate_until", GENERATE, "exact_match"),
        "chosen": ("multiple_choice", CHOOSE, "acc"),
    }
    tasks = {
        name: TASK.format(name=name, rows=rows, kind=kind, target=target, metric=metric)
        for name, (kind, target, metric) in wanted.items()
    }
    room = "generation_kwargs:\n  max_gen_toks: 8\n"  # the model's weights are random
    tasks["code"] = local("humaneval", "code", room)
    arguments = "model=dummy:dream-tiny,block_size=8,branches=2,mask_samples=2"
    found = theirs(tmp_path, tasks, arguments, "--confirm_run_unsafe_code")
    assert found["told"]["exact_match,none"] == 0.0
    assert 0.0 <= found["chosen"]["acc,none"] <= 1.0
    assert found["code"]["pass@1,create_test"] == 0.0


def test_examples_as_turns_of_a_chat(tmp_path: Path) -> None:
    """With a template that has turns: the built-in model's takes one message alone."""
    model = tmp_path / "model"
    model.mkdir()
    for file in BUILT_IN["tiny"].iterdir():
        (model / file.name).symlink_to(file)
    (model / "tokenizer_config.json").unlink()
    settings = json.loads((BUILT_IN["tiny"] / "tokenizer_config.json").read_text())
    turns = "{% for message in messages %}{{ message['content'] + '\n' }}{% endfor %}"
    (model / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": turns}))
    tasks = {"chat": local("gsm8k", "chat", "fewshot_split: test\n")}
    chat = ("--apply_chat_template", "--fewshot_as_multiturn", "true")
    found = theirs(tmp_path, tasks, f"model={model},max_new_tokens=8,block_size=4", *chat)
    assert found["chat"]["exact_match,strict-match"] == 0.0
    (samples,) = (tmp_path / "out").rglob("samples_*.jsonl")
    asked = json.loads(samples.read_text().splitlines()[0])["arguments"]["gen_args_0"]["arg_0"]
    assert asked.count('"role": "assistant"') == 5  # the task's own number of examples


def local(task: str, name: str, more: str = "") -> str:
    """A task of the harness, under another name, on ten rows of our own."""
    import lm_eval.tasks

    path = Path(lm_eval.tasks.__file__).parent / task / f"{task}.yaml"
    rows = Path(__file__).parent / "rows" / f"{task}.jsonl"
    files = f"dataset_kwargs:\n  data_files:\n    test: {rows}\n"
    data = f"dataset_path: json\ndataset_name: null\n{files}{more}"
    return f"include: {path}\ntask: {name}\n{data}"


def theirs(
    folder: Path, tasks: Mapping[str, str], arguments: str, *more: str
) -> Mapping[str, Mapping[str, Any]]:
    """What the harness's command says of tasks that have ten rows each."""
    for name, text in tasks.items():
        (folder / f"{name}.yaml").write_text(text)
    offline = {"HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [
            *(sys.executable, "-W", "ignore", "-m", "lopa.evaluation.harness"),
            *("--model", "lopa", "--model_args", arguments, "--tasks", ",".join(tasks)),
            *("--include_path", str(folder), "--output_path", str(folder / "out")),
            *("--batch_size", "4", "--log_samples", *more),
        ],
        env={**os.environ, **offline, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (found,) = (folder / "out").rglob("results_*.json")
    said = json.loads(found.read_text())
    assert {n: said["n-samples"][n]["effective"] for n in tasks} == dict.fromkeys(tasks, 10)
    results: dict[str, dict[str, Any]] = said["results"]
    return results
