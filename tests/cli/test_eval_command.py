from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_support import Run

FAST = ("--model", "dummy:dream-tiny", "--limit", "2", "--max-new-tokens", "8")
ROOM = ("--block-size", "4")


def test_json(run: Run, tmp_path: Path) -> None:
    samples = tmp_path / "samples.jsonl"
    more = ("--json", "--branches", "2", "--samples", str(samples))
    found = json.loads(run("eval", "words", *FAST, *ROOM, *more).out)
    assert found["problems"] == 2
    assert found["accuracy"] == 0.0
    assert found["settings"]["branches"] == 2
    assert found["rounds"] > 0
    assert found["tpf"] == found["tokens"] / found["rounds"]
    assert found["tokens_per_second"] > 0
    head, *rows = [json.loads(line) for line in samples.read_text().splitlines()]
    assert head["run"]["task"] == "words"
    assert [row["correct"] for row in rows] == [False, False]


def test_table(run: Run) -> None:
    result = run("eval", "functions", *FAST, *ROOM, "--split", "held-out", "--batch-size", "2")
    assert result.code == 0
    assert "functions, held-out, 2 problems" in result.out
    assert "95 % interval" in result.out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("sums",), "no task 'sums'"),
        (("words", "--split", "test"), "no split 'test'"),
        (("words", "--limit", "0"), "limit must be at least 1"),
        (("words", "--batch-size", "0"), "batch-size must be at least 1"),
        (("words", "--decoder", "d2f", "--branches", "2"), "branches is not used"),
    ],
)
def test_bad_input(run: Run, arguments: tuple[str, ...], named: str) -> None:
    result = run("eval", *FAST[:2], *arguments)
    assert result.code == 2
    assert named in result.err
    assert len(result.err.splitlines()) == 1
