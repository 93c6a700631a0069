"""Every study from the command line, on random weights: its figures and its picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lopa.cli.main import main
from lopa.cli.study import STUDIES
from lopa.studies import order

SMALL = ("--model", "dummy:dream-tiny", "--max-new-tokens", "16", "--block-size", "8")


def study(name: str, folder: Path, capsys: pytest.CaptureFixture[str], *more: str) -> Any:
    size = ("--limit", "1", "--branches", "2", "--threshold", "0.02", *more)
    assert main(["study", name, *SMALL, *size, "--out", str(folder), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", STUDIES)
def test_study(
    name: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(order, "ORDERS", 3)
    found = study(name, tmp_path, capsys)
    assert found == json.loads((tmp_path / f"{name}.json").read_text())
    assert (found["study"], found["problems"]) == (name, 1)
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / f"{name}.svg").read_text()
    findings = found["findings"]
    if name == "branches":
        assert [p["options"]["branches"] for p in findings["points"]] == [0, 1, 3, 7, "auto"]
    elif name == "ablation":
        assert next(iter(findings["variants"])) == "no lookahead"
    elif name == "order":
        assert len(findings["problems"][0]["random_tpf"]) == 3
    elif name == "calibration":
        assert set(findings["scores"]) == {"mean", "window", "segment", "fills"}
    else:
        for part in findings["branches"].values():
            assert sum(part["shares"].values()) == pytest.approx(1.0)


def test_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["study", "luck", *SMALL]) == 2
    assert "no study 'luck'" in capsys.readouterr().err
    assert main(["study", "order", *SMALL, "--branches", "0"]) == 2
    assert "about lookahead" in capsys.readouterr().err
