"""`lopa eval --sweep`: its files, and what an interruption does to them: nothing."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from cli_support import Run

from lopa.evaluation import evaluate as evaluation
from lopa.evaluation.sample import Sample

FAST = ("--model", "dummy:dream-tiny", "--limit", "2", "--max-new-tokens", "8", "--block-size", "4")
AXES = ("--sweep", "branches=0,2", "threshold=0.5,0.9")
TIMES = re.compile("second|latency")


def timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: timeless(v) for k, v in value.items() if not TIMES.search(k)}
    return [timeless(v) for v in value] if isinstance(value, list) else value


def test_interrupted_and_run_again(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run("eval", "words", *FAST, *AXES, "--out", str(whole)).code == 0

    real, made = evaluation.make_sample, []

    def interrupt(*arguments: Any, **more: Any) -> Sample:
        if len(made) == 3:
            raise KeyboardInterrupt
        made.append(real(*arguments, **more))
        return made[-1]

    monkeypatch.setattr(evaluation, "make_sample", interrupt)
    stopped = run("eval", "words", *FAST, *AXES, "--out", str(parts))
    assert stopped.code == 130
    assert f"3 of 8 answers are kept in {parts}: the same command goes on" in stopped.err
    monkeypatch.undo()
    samples = parts / "samples.jsonl"
    assert len(samples.read_text().splitlines()) == 1 + 3
    with samples.open("a") as file:
        file.write('{"setting": "branches=2 thre')  # cut short by the stop
    result = run("eval", "words", *FAST, *AXES, "--out", str(parts), "--json")
    assert result.code == 0
    reports = [json.loads((f / "report.json").read_text()) for f in (whole, parts)]
    assert timeless(reports[0]) == timeless(reports[1]) == timeless(json.loads(result.out))
    assert [p["options"] for p in reports[0]["points"]] == [
        {"branches": k, "threshold": t} for k in (0, 2) for t in (0.5, 0.9)
    ]
    assert [c["shared"] for c in reports[0]["curves"]] == [{"threshold": 0.5}, {"threshold": 0.9}]
    for name in ("axis", "tradeoff", "rounds"):
        assert (whole / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in (whole / f"{name}.svg").read_text()
    page = (whole / "report.html").read_text()
    assert page.count("<svg") == 3
    assert not re.search(r"""(src|href)=["'](?!#)""", page)  # self-contained
    assert "branches=2 threshold=0.9" in page
    names = re.findall(r'\bid="([^"]+)"', page)
    assert len(set(names)) == len(names)


def test_a_folder_of_another_run_is_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "samples.jsonl").write_text('{"run": {}}\n')
    result = run("eval", "words", *FAST, *AXES, "--out", str(tmp_path))
    assert "holds another run" in result.error
    assert result.code == 2


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--sweep", "beams=1,2"), "cannot sweep 'beams'"),
        (("--sweep", "branches"), "give each setting once"),
        (("--sweep", "branches=1,1"), "each of its values once"),
        (("--sweep", "branches=1,x"), "branches must be a whole number"),
        (("branches=1,2",), "goes with --sweep"),
        (("--sweep", "branches=1", "--samples", "x"), "leave --samples out"),
    ],
)
def test_bad_input(run: Run, arguments: tuple[str, ...], named: str) -> None:
    assert named in run("eval", "words", *FAST, *arguments).error
