"""`lopa models` and `lopa doctor`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_support import Run

from lopa.cli import info
from lopa.models.families import FAMILIES
from lopa.models.files import BUILT_IN


def test_models(run: Run) -> None:
    result = run("models")
    assert result.code == 0
    for family in FAMILIES:
        for name in (*family.hub_ids, *family.adapters, *family.shapes):
            assert name in result.out


def test_models_as_json(run: Run) -> None:
    found = json.loads(run("models", "--json").out)
    families = {family["name"]: family for family in found["families"]}
    assert "Dream-org/Dream-v0-Instruct-7B" in families["dream"]["hub_ids"]
    assert "lopa" in families["dream"]["decoders"]
    dummies = {dummy["name"]: dummy for dummy in found["dummies"]}
    assert dummies["dummy:dream-7b"]["parameters"] == 7_615_616_512  # as on its model card
    assert dummies["dummy:llada-8b"]["parameters"] == 8_015_581_184
    assert dummies["dummy:sdar-8b"]["parameters"] == 8_190_735_360
    assert dummies["dummy:dream-7b"]["bf16_bytes"] == 15_231_233_024
    for dummy in dummies.values():
        assert dummy["family"] in families


def test_doctor(run: Run) -> None:
    result = run("doctor")
    assert result.code == 0
    for word in ("python", "torch", "safetensors", "tokenizers", "memory", "device used"):
        assert word in result.out


def test_doctor_as_json(run: Run) -> None:
    found = json.loads(run("doctor", "--json").out)
    assert found["broken"] == []
    assert found["decodes"] is True
    assert found["devices"][0]["name"] == "cpu"
    assert found["versions"]["torch"]


def test_doctor_finds_a_broken_package(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(info, "_REQUIRED", (*info._REQUIRED, "no_such_package"))
    result = run("doctor")
    assert result.code == 1
    assert "no_such_package" in result.out


def test_doctor_finds_a_broken_model(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(BUILT_IN, "tiny", tmp_path)
    assert run("doctor", "--json").code == 0  # absent is not broken
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"cut")
    result = run("doctor", "--json")
    assert result.code == 1
    assert "model.safetensors" in json.loads(result.out)["broken"][0]


def test_make_tiny(run: Run, tmp_path: Path) -> None:
    for family in FAMILIES:
        folder = tmp_path / family.name
        assert run("models", "make-tiny", family.name, str(folder)).code == 0
        short = ("--max-new-tokens", "8", "--block-size", "4", "--json")
        result = run("generate", "5 6 7", "--model", str(folder), *short)
        found = json.loads(result.out)
        assert found["decoder"] in family.decoders
        assert len(found["token_ids"]) == found["tokens"] > 0
    assert "exists already" in run("models", "make-tiny", "dream", str(tmp_path)).error
    assert "choose from dream, llada" in run("models", "make-tiny", "gpt", "x").error
