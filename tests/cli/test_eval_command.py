from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_support import Run

from lopa.evaluation import evaluate as evaluation
from lopa.evaluation.sandbox.zygote_client import ZYGOTES

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


def test_a_run_goes_on_where_it_was(run: Run, tmp_path: Path) -> None:
    samples = tmp_path / "samples.jsonl"
    asked = ("eval", "words", *FAST, *ROOM, "--samples", str(samples), "--json")
    whole = json.loads(run(*asked).out)
    lines = samples.read_text().splitlines(keepends=True)
    samples.write_text("".join(lines[:2]) + lines[2][:20])  # cut short by a stop
    again = json.loads(run(*asked).out)
    assert samples.read_text().startswith("".join(lines[:2]))
    for found in (whole, again):
        assert found["tokens_per_second_max"] >= found["tokens_per_second_top10"]
        assert found["latency_p95"] >= found["latency_p50"] >= found["first_round_seconds"]
    same = ("accuracy", "interval", "tokens", "rounds", "tpf", "tpf_paper", "settings", "asked")
    assert {n: whole[n] for n in same} == {n: again[n] for n in same}


def test_an_interrupted_run_says_how_to_go_on(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*arguments: object, **more: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(evaluation, "make_sample", interrupt)
    stopped = run("eval", "words", *FAST, *ROOM)
    assert (stopped.code, stopped.out) == (130, "")
    assert "nothing is kept: with --samples FILE" in stopped.err
    kept = tmp_path / "samples.jsonl"
    stopped = run("eval", "words", *FAST, *ROOM, "--samples", str(kept))
    assert f"0 of 2 answers are kept in {kept}" in stopped.err


def test_the_default_is_a_minute_of_problems(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*arguments: object, **more: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(evaluation, "make_sample", interrupt)
    kept = tmp_path / "samples.jsonl"
    short = ("--max-new-tokens", "8", *ROOM, "--samples", str(kept))
    stopped = run("eval", "words", "--model", "dummy:dream-tiny", *short)
    assert "0 of 100 answers" in stopped.err


def test_table(run: Run) -> None:
    result = run("eval", "functions", *FAST, *ROOM, "--split", "held-out", "--batch-size", "2")
    assert result.code == 0
    assert "functions, held-out, 2 problems" in result.out
    assert "95 % interval" in result.out


def test_code_without_isolation_is_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ("eval", "functions", *FAST, *ROOM)
    assert "unsafe_code" not in json.loads(run(*asked, "--json").out)
    monkeypatch.setattr(ZYGOTES, "walls", ("no such walls",))
    refused = run(*asked)
    assert refused.code != 0
    assert "generated code is not run" in refused.err
    assert len(refused.err.splitlines()) == 1
    assert run("eval", "words", *FAST, *ROOM).code == 0  # there is none to run
    assert json.loads(run(*asked, "--unsafe-code", "--json").out)["unsafe_code"] is True
    assert "unsafe code" in run(*asked, "--unsafe-code").out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("sums",), "no task 'sums'"),
        (("words", "--split", "test"), "no split 'test'"),
        (("words", "--limit", "0"), "limit must be at least 1"),
        (("words", "--batch-size", "0"), "batch-size must be at least 1"),
        (("words", "--data", "rows.jsonl"), "--data goes with a benchmark"),
        (("words", "--shots", "2"), "--shots goes with a benchmark"),
        (("words", "--no-chat"), "--chat goes with a benchmark"),
        (("gsm8k", "--split", "eval"), "gsm8k has no --split"),
        (("gsm8k", "--chat"), "no chat template"),
        (("gsm8k", "--data", "absent.jsonl"), "cannot read absent.jsonl"),
        (("words", "--decoder", "d2f", "--branches", "2"), "branches is not used"),
    ],
)
def test_bad_input(run: Run, arguments: tuple[str, ...], named: str) -> None:
    result = run("eval", *FAST[:2], *arguments)
    assert result.code == 2
    assert named in result.err
    assert len(result.err.splitlines()) == 1


@pytest.mark.parametrize("task", ["functions", "words"])
def test_hidden_lines(run: Run, task: str) -> None:
    fast = ("eval", task, "--model", "dummy:dream-tiny", "--limit", "1", "--infill", "--json")
    given = json.loads(run(*fast, "--true-length").out)
    assert given["infill"] == "true"
    assert given["accuracy"] == 0.0
    searched = json.loads(run(*fast, "--max-new-tokens", "3", "--branches", "0").out)
    assert searched["infill"] == "searched"
    assert 1 <= searched["tokens"] <= 3
    assert searched["asked"] != given["asked"]
    assert "goes with --infill" in run(*fast[:-2], "--true-length").error
