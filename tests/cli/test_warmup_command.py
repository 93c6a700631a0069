"""`lopa warmup`, and what `lopa doctor` says of a device."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cli_support import DUMMY, Run

from lopa import LLM
from lopa.cli import device_report
from lopa.decoding.round_cost import RoundCost
from lopa.engine import cost_measurement
from lopa.kernels.compilation import Compiled
from lopa.serving.engine_process import worker

H200 = Path(__file__).parents[2] / "measurements/h200"
COST = RoundCost(((64, 0.004), (128, 0.005), (256, 0.006), (512, 0.0105), (1024, 0.02)))


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOPA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cost_measurement, "measure", lambda *_, **__: COST)
    return tmp_path


def test_on_a_cpu(run: Run, kept: Path) -> None:
    result = run("warmup", *DUMMY, "--device", "cpu")
    assert result.code == 0
    assert "dummy:dream-tiny is ready after " in result.out
    assert "no kernels to compile on cpu" in result.out
    assert f"kept in {kept / 'round_cost'}" in result.out
    assert "was known" in run("warmup", *DUMMY, "--device", "cpu").out


def test_as_json(run: Run, kept: Path) -> None:
    found = json.loads(run("warmup", *DUMMY, "--device", "cpu", "--json").out)
    assert (found["kernels"], found["graphs"], found["cost_was_kept"]) == ([], 0, False)
    assert set(found["seconds"]) == {"load", "compile", "cost", "graphs"}
    llm = LLM("dummy:dream-tiny", device="cpu")
    assert llm.knows_round_cost  # kept for the next run
    assert llm.round_cost.points == COST.points


def test_kernels_and_graphs(run: Run, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: all that it may use, and one that failed is named."""
    asked: list[Any] = []

    def compile_kernels(self: object, progress: Any, **more: Any) -> list[Compiled]:
        asked.append((more["sampling"], more["fitting"]))
        return [Compiled("_attend", 2.5), Compiled("_sums", 1.5, "OutOfResources: shared memory")]

    backend = "lopa.runner.backend_torch.TorchBackend"
    monkeypatch.setattr(f"{backend}.warm_up", lambda self, tokens, progress: tokens // 32)
    llm = LLM("dummy:dream-tiny", device="cpu")
    monkeypatch.setattr(f"{backend}.compile_kernels", compile_kernels)
    monkeypatch.setattr("lopa.cli.warmup.load", lambda model: llm)
    result = run("warmup", *DUMMY, "--tokens", "64")
    assert asked == [(True, True)]
    assert "2 kernels (4.0 s of one CPU)" in result.out
    assert "2 graphs captured" in result.out
    assert "note: the kernel _sums was not compiled: OutOfResources" in result.err


# -- while kernels are compiled ------------------------------------------------------------------


def test_lines_of_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, lines = [0.0], list[str]()
    monkeypatch.setattr(worker, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    notes = worker._CompileNotes(lines.append)
    for done in range(4):
        notes.show(done, 3)
    assert lines == []  # from disk
    for done in range(4):
        notes.show(done, 3)
        clock[0] += 2
    assert lines == ["compiling 3 kernels for this GPU, once", "3 kernels compiled in 6.0 s"]


# -- doctor ---------------------------------------------------------------------------------------


def test_what_rounds_cost_is_said(run: Run, kept: Path) -> None:
    assert "not measured yet" in run("doctor").out
    run("warmup", *DUMMY, "--device", "cpu")
    found = json.loads(run("doctor", "--json").out)["device"]
    (rounds,) = found["rounds"]
    assert (rounds["model"], rounds["kind"]) == ("dummy:dream-tiny", "float32")
    assert rounds["one_row_ms"] == pytest.approx(4.0)
    assert rounds["eight_rows_ms"] == pytest.approx(10.5)
    assert found["backend"] == "sdpa"
    said = " ".join(run("doctor").out.split())
    assert "4.00 ms with one row, 10.50 with eight (measured)" in said
    assert f"auto begins with k = {rounds['branches']}" in said
    assert "(projected)" in said


def test_branches_are_cheap_or_dear() -> None:
    flat = device_report._rounds(RoundCost(((64, 0.001), (1024, 0.00101))))
    steep = device_report._rounds(RoundCost(((64, 0.1), (1024, 16.0))))
    assert flat["branches"] > steep["branches"]
    assert flat["tokens_per_second"] > 1000 > steep["tokens_per_second"]


def test_fp8_by_capability() -> None:
    assert device_report._fp8((9, 0)).startswith("yes")
    assert "this GPU has 8.0" in device_report._fp8((8, 0))


def test_the_recorded_rounds() -> None:
    for kind, index in (("bf16", 0), ("fp8", 1)):
        rounds = json.loads((H200 / f"rounds_{kind}.json").read_text())["rounds"]
        recorded = {r["tokens"]: r["round_ms"] for r in rounds if r["window"] == 64}
        for tokens, both in device_report.H200_ROUNDS.items():
            assert both[index] == pytest.approx(recorded[tokens], abs=0.01)


def test_a_kernel_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lopa.kernels.compilation.ensure_triton_folder", lambda: None)
    monkeypatch.setattr(
        "lopa.kernels.triton.kv_write.gather",
        lambda hidden, carry, source: torch.stack([hidden[2], carry[0]]),
    )
    device_report.try_a_kernel(torch.device("cpu"))
    monkeypatch.setattr("lopa.kernels.triton.kv_write.gather", lambda hidden, *_: hidden[:2])
    with pytest.raises(RuntimeError, match="wrong result"):
        device_report.try_a_kernel(torch.device("cpu"))
