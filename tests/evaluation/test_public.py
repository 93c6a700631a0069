"""Public benchmarks from our command, offline, on ten rows each, and what scores there."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lopa.cli.main import main
from lopa.evaluation import evaluate as evaluation
from lopa.evaluation.benchmark import Benchmark
from lopa.evaluation.public import benchmark
from lopa.evaluation.rows import read_rows
from lopa.evaluation.sample import Sample

pytestmark = [pytest.mark.harness, pytest.mark.filterwarnings("ignore")]

ROWS = Path(__file__).parent / "rows"
FAST = ("--model", "dummy:dream-tiny", "--max-new-tokens", "8", "--block-size", "4")
NAMES = ("gsm8k", "math", "humaneval", "mbpp", "humaneval+", "mbpp+")
HOSTILE = {
    "loops": "while True:\n        pass",
    "allocates": "x = bytearray(10 ** 12)",
    "forks": "import os\n    os.fork()",
    "writes": "open({path!r}, 'w').write('x')",
    "removes": "import os\n    os.remove({path!r})",
    "leaves": "import os\n    os._exit(0)",
}

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: str) -> tuple[int, str, str]:
        capfd.readouterr()
        code = main(("eval", *arguments))
        return code, *capfd.readouterr()

    return run


def data(name: str) -> Path:
    return ROWS / ("plus.jsonl" if name.endswith("+") else f"{name}.jsonl")


def made(name: str, **options: Any) -> Benchmark:
    return benchmark(name, chat=False, data=data(name), **options)


@pytest.mark.parametrize("name", NAMES)
def test_our_command(run: Run, name: str, tmp_path: Path) -> None:
    samples = tmp_path / "samples.jsonl"
    arguments = (name, "--data", str(data(name)), *FAST, "--samples", str(samples))
    code, out, err = run(*arguments, "--batch-size", "5", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["problems"] == 10
    assert found["accuracy"] == 0.0  # the model's weights are random
    assert found["tpf"] == found["tokens"] / found["rounds"]
    assert found["tpf_paper"] == found["tokens_paper"] / (found["rounds"] + 10)
    most, top = found["tokens_per_second_max"], found["tokens_per_second_top10"]
    assert most >= top > 0
    assert found["tokens_per_second_together"] > 0
    assert found["latency_p95"] >= found["latency_p50"] > 0
    assert found["latency_mean"] > found["first_round_seconds"] > 0  # means of the same answers
    assert found["latency_mean"] > found["latency_after_first"]
    _, *rows = [json.loads(line) for line in samples.read_text().splitlines()]
    assert sorted(row["problem"] for row in rows) == list(range(10))
    assert all(row["prompt"] and not row["correct"] for row in rows)
    assert all(row["seconds"] >= row["first_round_seconds"] > 0 for row in rows)


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("gsm8k", "answer"),
        ("math", "solution"),
        ("humaneval", "canonical_solution"),
        ("mbpp", "code"),
        ("humaneval+", "canonical_solution"),
        ("mbpp+", "canonical_solution"),
    ],
)
def test_a_right_answer_scores_and_a_wrong_one_does_not(name: str, field: str) -> None:
    rows = read_rows(data(name), name, ())
    exercises = made(name).exercises
    for index in (0, 9):
        scores = exercises[index].score(rows[index][field])
        assert next(iter(scores.values()))
        for wrong in (rows[3][field], "", "\0", "def", "\ud800", "((" * 500):
            assert not any(exercises[index].score(wrong).values()), wrong


@pytest.mark.parametrize("name", ["humaneval", "mbpp", "humaneval+", "mbpp+"])
@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_code_scores_nothing_and_harms_nothing(
    name: str, kind: str, tmp_path: Path
) -> None:
    kept = tmp_path / "kept"
    kept.write_text("kept")
    tmp_path.chmod(0o777)
    kept.chmod(0o666)
    path = str(kept if kind == "removes" else tmp_path / "new")
    body = f"    {HOSTILE[kind].format(path=path)}\n    return n + 7\n"
    whole = f"def plus_seven(n):\n{body}" if name == "mbpp" else body
    assert not any(made(name, limit=1).exercises[0].score(whole).values())
    assert kept.read_text() == "kept"
    assert [entry.name for entry in tmp_path.iterdir()] == ["kept"]


def test_the_paper_s_questions() -> None:
    """Examples, turns and beginnings, where the model has a template."""
    asked = benchmark("gsm8k", chat=True, data=data("gsm8k")).exercises[0].prompt
    assert [m["role"] for m in asked] == ["user", "assistant"] * 4 + ["user"]  # type: ignore[index]
    turns = [m["content"] for m in asked]  # type: ignore[index]
    question = read_rows(data("gsm8k"), "gsm8k", ())[0]["question"]
    assert [question in turn for turn in turns] == [False] * 8 + [True]  # never its own example
    assert len(benchmark("math", chat=True, data=data("math")).exercises[0].prompt) == 9
    assert len(benchmark("mbpp", chat=True, data=data("mbpp")).exercises[0].prompt) == 7
    assert made("humaneval").exercises[0].prompt == 'def plus_seven(n):\n    """Return n + 7."""\n'
    assert made("humaneval").stop == ()
    assert "Question:" in made("gsm8k").stop
    plus = benchmark("mbpp+", chat=True, data=data("mbpp+")).exercises[0]
    assert plus.opening == "```python\n"
    assert plus.score("def plus_seven(n):\n    return n + 7\n```\nThat is it.")["plus"]


def test_examples_from_another_file(tmp_path: Path) -> None:
    (tmp_path / "others.json").write_text(
        json.dumps([{"question": f"Other {i}?", "answer": f"#### {i}"} for i in range(3)])
    )
    asked = made("gsm8k", shots=2, shots_data=tmp_path / "others.json").exercises
    assert all(str(e.prompt).count("Other") == 2 for e in asked)


def test_interrupted_and_run_again(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def timeless(out: str) -> dict[str, Any]:
        return {k: v for k, v in json.loads(out).items() if not re.search("second|latency", k)}

    asked = ("gsm8k", "--data", str(data("gsm8k")), *FAST, "--shots", "2", "--json")
    whole = run(*asked)[1]
    real, made = evaluation.make_sample, []

    def interrupt(*arguments: Any, **more: Any) -> Sample:
        if len(made) == 3:
            raise KeyboardInterrupt
        made.append(real(*arguments, **more))
        return made[-1]

    kept = ("--samples", str(tmp_path / "samples.jsonl"))
    monkeypatch.setattr(evaluation, "make_sample", interrupt)
    assert run(*asked, *kept)[0] == 130
    monkeypatch.undo()
    before = (tmp_path / "samples.jsonl").read_text()
    assert len(before.splitlines()) == 1 + 3
    resumed = run(*asked, *kept)[1]
    assert timeless(resumed) == timeless(whole)
    assert (tmp_path / "samples.jsonl").read_text().startswith(before)
    code, _, err = run(*asked, *kept, "--branches", "2")
    assert code == 2
    assert "holds another run" in err


def test_a_sweep(run: Run, tmp_path: Path) -> None:
    more = ("--limit", "2", "--sweep", "branches=0,2", "--out", str(tmp_path), "--json")
    code, out, err = run("mbpp+", "--data", str(data("mbpp+")), *FAST, *more)
    assert code == 0, err
    report = json.loads(out)
    assert [p["options"] for p in report["points"]] == [{"branches": 0}, {"branches": 2}]
    assert report["points"][0]["scores"] == {"plus": 0.0, "base": 0.0}
    assert (tmp_path / "report.html").exists()


@pytest.mark.parametrize("name", ["gsm8k", "mbpp+"])
def test_without_network_or_rows(run: Run, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    import evalplus.data

    def fail(*_: Any, **__: Any) -> None:
        raise ConnectionError("no route to anywhere")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    monkeypatch.setattr(evalplus.data, "get_mbpp_plus", fail)
    code, out, err = run(name, *FAST)
    assert (code, out) == (2, "")
    assert err.splitlines() == [
        f"error: the rows of {name} could not be fetched (no route to anywhere): "
        "give them with --data FILE"
    ]


def test_rows_that_cannot_be_used(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"problem": "1 + 1?", "solution": "two"}) + "\n")
    with pytest.raises(ValueError, match="the rows of math cannot be used"):
        benchmark("math", chat=False, data=rows)


@pytest.mark.parametrize(
    "cheat",
    [
        "class passed(Exception): pass\nraise passed",
        "class passed(Exception): pass\ndef add(a, b): raise passed",
        "import os\n[os.write(d, b'!passed') for d in range(20) if os.isatty(d) or True]",
        "class A:\n    def __eq__(self, other): return True\ndef add(a, b): return A()",
    ],
)
def test_the_harness_s_metric_counts_verdicts(cheat: str) -> None:
    from lopa.evaluation.code_eval import CodeEval

    answers = [cheat, "def add(a, b): return a + b", "def add(a, b): return a * b"]
    shares, ended = CodeEval().compute(
        references=["assert add(2, 3) == 5"], predictions=[answers], k=[1, 3]
    )
    assert shares == {"pass@1": pytest.approx(1 / 3), "pass@3": 1.0}
    assert [reason == "passed" for reason in ended[0]] == [False, True, False]


def test_helpers_of_a_prompt_are_not_the_answer_s(tmp_path: Path) -> None:
    from lopa.evaluation import code_eval

    prompt = 'def double(x):\n    return 2 * x\n\n\ndef half(x):\n    """Undo double."""\n'
    tests = "def check(candidate):\n    assert candidate(double(3)) == 3\n"
    row = {"task_id": "Made/0", "prompt": prompt, "entry_point": "half", "test": tests}
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(row) + "\n")
    (exercise,) = benchmark("humaneval", chat=False, data=rows).exercises
    right, cheat = "    return x // 2\n", "    return x\ndef double(x):\n    return x\n"
    assert all(exercise.score(right).values())
    assert not any(exercise.score(cheat).values())
    code_eval.remember(row)
    _, ended = code_eval.CodeEval().compute(
        references=[f"{tests}\ncheck(half)"], predictions=[[prompt + right, prompt + cheat]]
    )
    assert ended == {0: ["passed", "AssertionError"]}
