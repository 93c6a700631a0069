"""Every study from the command line, on random weights: its figures and its picture."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from lopa.cli.main import main
from lopa.cli.study import STUDIES
from lopa.studies import accept, auto, calibration, order, sync

SMALL = ("--model", "dummy:dream-tiny", "--max-new-tokens", "16", "--block-size", "8")


def study(name: str, folder: Path, capsys: pytest.CaptureFixture[str], *more: str) -> Any:
    # A threshold that few masks pass, so that there is something to look ahead for.
    size = ("--limit", "1", "--branches", "2", "--threshold", "0.5", *more)
    assert main(["study", name, *SMALL, *size, "--out", str(folder), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def costs(folder: Path) -> list[str]:
    """Of a device on which branches cost nothing, and of one on which only they cost."""
    flat, steep = folder / "flat.json", folder / "steep.json"
    host = {"model": "a", "quantize": None, "dtype": "b", "device": "c"}
    rounds = [{"tokens": 8, "round_ms": 1.0}, {"tokens": 16, "round_ms": 1.0}]
    flat.write_text(json.dumps({"host": host, "rounds": rounds}))
    points = [[8, 0.001], [16, 0.1]]
    found = {"study": "speed", "host": {**host, "device": "d"}, "findings": {"round_cost": points}}
    steep.write_text(json.dumps(found))
    return ["--cost", str(flat), "--cost", str(steep)]


@pytest.mark.parametrize("name", [name for name in STUDIES if name != "sync"])
def test_study(
    name: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(order, "ORDERS", 3)
    monkeypatch.setattr(auto, "THRESHOLDS", (0.5, 0.4))
    more = ["--at-once", "1,2"] if name == "load" else []
    found = study(name, tmp_path, capsys, *more)
    assert import_module(f"lopa.studies.{name}").reading(found["findings"])
    assert found == json.loads((tmp_path / f"{name}.json").read_text())
    assert (found["study"], found["problems"]) == (name, 1)
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / f"{name}.svg").read_text()
    findings = found["findings"]
    if name == "branches":
        assert [p["options"]["branches"] for p in findings["points"]] == 3 * [0, 1, 3, 7, 15]
    elif name in ("accept", "exact"):
        arms = findings["arms"]
        assert list(arms) == list(import_module(f"lopa.studies.{name}").ARMS)
        assert (arms[accept.D2F]["difference"], arms[accept.D2F]["same_answers"]) == (0.0, 1.0)
        if name == "exact":
            assert all(arm["same_answers"] == 1 for arm in arms.values())
            assert any(arm["tpf"] > arms[accept.D2F]["tpf"] for arm in arms.values())
    elif name == "ablation":
        assert next(iter(findings["variants"])) == "no lookahead"
    elif name == "order":
        assert len(findings["problems"][0]["random_tpf"]) == 3
    elif name == "calibration":
        assert set(findings["scores"]) == {"mean", "window", "segment", "fills"}
        assert findings["guard"] in (0.0, *calibration.FLOORS)
    elif name == "auto":
        assert {c["shared"]["decoding"] for c in findings["curves"]} == set(auto.ARMS)
    elif name == "speed":
        assert findings["settings"]["auto"]["interval"] == [1.0, 1.0]
    elif name == "load":
        assert [load["at_once"] for load in findings["loads"]] == [1, 2]
        assert all(len(load["settings"]) == 6 for load in findings["loads"])
    else:
        for part in findings["branches"].values():
            assert sum(part["shares"].values()) == pytest.approx(1.0)


@pytest.mark.parallel
def test_sync(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Two ranks over gloo, each attention and number of branches."""
    size = ("--model", "dummy:dream-tiny", "--max-new-tokens", "64", "--threshold", "0.99")
    more = ("--limit", "1", "--rounds", "2", "--branch-parallel", "2", "--device", "cpu")
    command = ["study", "sync", *size, *more, "--out", str(tmp_path)]
    assert main(command) == 0
    found = json.loads((tmp_path / "sync.json").read_text())
    points = found["findings"]["points"]
    assert {(p["attention"], p["branches"]) for p in points} == {
        (attention, k) for attention in ("full", "block") for k in sync.BRANCHES
    }
    assert all(p["branch_parallel"] == len(p["ranks"]) == 2 for p in points)
    assert all(p["commits"] == 0 for p in points if p["attention"] == "block")
    assert "of the forward's time" in capfd.readouterr().out


@pytest.mark.usefixtures("no_pictures")
def test_an_interrupted_study_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = study("branches", tmp_path, capsys, "--batch-size", "3")
    samples = tmp_path / "samples.jsonl"
    lines = samples.read_text().splitlines(keepends=True)
    samples.write_text("".join(lines[:4]) + lines[4][:20])  # stopped in the middle of a line
    assert _untimed(study("branches", tmp_path, capsys, "--batch-size", "3")) == _untimed(whole)
    assert len(samples.read_text().splitlines()) == len(lines)
    # Another study of the same problems takes from it what both have.
    study("ablation", tmp_path, capsys)
    own = [json.loads(line)["setting"] for line in samples.read_text().splitlines()[1:]]
    assert len(own) == len(set(own))


@pytest.mark.usefixtures("no_pictures")
def test_a_report_of_what_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = study("branches", tmp_path, capsys)
    samples = tmp_path / "samples.jsonl"
    assert main(["study", "branches", "--out", str(tmp_path), "--report"]) == 0
    again = json.loads((tmp_path / "branches.json").read_text())
    assert again["findings"] == whole["findings"]
    assert "--task words --split eval --limit 1 --seed 0" in again["command"]
    lines = samples.read_text().splitlines(keepends=True)
    samples.write_text("".join(lines[:-1]))  # one setting is not decoded
    assert main(["study", "branches", "--out", str(tmp_path), "--report"]) == 0
    left = json.loads((tmp_path / "branches.json").read_text())["findings"]["points"]
    assert len(left) == len(whole["findings"]["points"]) - 1
    assert main(["study", "speed", "--out", str(tmp_path), "--report"]) == 2
    assert "cannot be reported" in capsys.readouterr().err


def test_problems_of_another_split(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are others, and a report says which they were."""
    found = study("accept", tmp_path, capsys, "--split", "held-out")
    assert found["split"] == "held-out"
    assert "--split held-out" in _described(tmp_path, "accept", capsys)
    with pytest.raises(AssertionError):  # the folder has samples of other problems
        study("accept", tmp_path, capsys)
    assert "samples.jsonl" in capsys.readouterr().err
    assert main(["study", "accept", *SMALL, "--split", "luck", "--out", str(tmp_path)]) == 2
    assert "no split 'luck'" in capsys.readouterr().err


def _described(folder: Path, name: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["study", name, "--out", str(folder), "--report"]) == 0
    assert "words (held-out), 1 problems, seed 0" in capsys.readouterr().out
    command: str = json.loads((folder / f"{name}.json").read_text())["command"]
    return command


@pytest.mark.usefixtures("no_pictures")
def test_a_simulated_load_goes_on_and_can_be_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [*costs(tmp_path), "--at-once", "1"]
    whole = study("load", tmp_path, capsys, *given)
    flat, steep = whole["findings"]["loads"]
    assert flat["best"] != "0"
    assert steep["best"] == "0"
    assert flat["settings"]["auto"]["branches"] > 1 > steep["settings"]["auto"]["branches"]
    assert study("load", tmp_path, capsys, *given) == whole
    assert main(["study", "load", "--out", str(tmp_path), "--report"]) == 0
    again = json.loads((tmp_path / "load.json").read_text())
    assert again["findings"] == whole["findings"]
    capsys.readouterr()


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("load", ["--cost", "nowhere.json"], "cannot read nowhere.json"),
        (
            "load",
            ["--cost", "{folder}/bad.json"],
            "bad.json is no round cost, and no file of",
        ),
        ("load", ["--cost", "{folder}/free.json"], "tokens rising, above 0"),
        ("speed", ["--cost", "x.json"], "leave --cost out"),
    ],
)
def test_bad_costs(
    name: str,
    given: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "bad.json").write_text("[]")
    free = [{"tokens": 8, "round_ms": 0.0}]
    host = {"model": "a", "quantize": None, "dtype": "b", "device": "c"}
    (tmp_path / "free.json").write_text(json.dumps({"host": host, "rounds": free}))
    given = [part.format(folder=tmp_path) for part in given]
    assert main(["study", name, *SMALL, *given, "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parallel
def test_workers_give_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alone = study("branches", tmp_path / "a", capsys)
    shared = study("branches", tmp_path / "b", capsys, "--workers", "2")
    assert _untimed(shared) == _untimed(alone)


def _untimed(found: Any) -> Any:
    def keep(point: Any) -> Any:
        clocks = ("second", "latency")
        return {k: v for k, v in point.items() if not any(c in k for c in clocks)}

    return [keep(point) for point in found["findings"]["points"]]


def test_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["study", "luck", *SMALL]) == 2
    assert "no study 'luck'" in capsys.readouterr().err
    assert main(["study", "order", *SMALL, "--branches", "0"]) == 2
    assert "about lookahead" in capsys.readouterr().err
    assert main(["study", "order", *SMALL, "--branch-parallel", "2"]) == 2
    assert "leave --branch-parallel out" in capsys.readouterr().err


def test_a_missing_package_is_found_before_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["study", "ablation", *SMALL, "--out", str(tmp_path / "new")]) == 2
    assert "pip install 'lopa[plots]'" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
