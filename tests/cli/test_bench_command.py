from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_support import DUMMY, Run

from lopa import LLM
from lopa.bench import ceilings
from lopa.models import checkpoint, llada2


@pytest.fixture(scope="module", autouse=True)
def _ceilings_measured_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(ceilings, "measure", functools.cache(ceilings.measure))
        yield


def test_round(run: Run) -> None:
    command = ("bench", "round", *DUMMY, "--branches", "0,2", "--window", "32,64", "--prefix", "40")
    result = run(*command, "--rounds", "3", "--json")
    found = json.loads(result.out)
    lines = found["rounds"]
    assert [(r["branches"], r["window"], r["tokens"]) for r in lines] == [
        (0, 32, 32),
        (2, 32, 96),
        (0, 64, 64),
        (2, 64, 192),
    ]
    llm = LLM("dummy:dream-tiny")
    model, parts = llm.config, llm.model.named_parameters()
    weights = sum(part.numel() for name, part in parts if name != "embedding.weight")
    weights -= model.hidden_size  # the last norm
    head = 2 * model.layers * model.kv_heads * model.head_dim  # of keys and values, a token
    for line in lines:
        assert line["rounds"] == 3
        assert 0 < line["forward_ms"] <= line["round_ms"]
        # Every weight and every cached key read once, every weight used once a token, and every
        # key and value that a token sees; of the embeddings a row is read.
        read = 4 * (weights + head * (40 + line["tokens"])) / found["bytes_per_second"]
        seen = 2 * model.layers * model.heads * model.head_dim * (40 + line["window"])
        done = 2 * (weights + seen) * line["tokens"] / found["flops_per_second"]
        assert line["touched_experts"] is None
        assert line["floor_ms"] == pytest.approx(1e3 * max(read, done))
        assert line["ratio"] == pytest.approx(line["round_ms"] / line["floor_ms"])
    assert {"torch", "dtype", "device"} <= set(found["host"])
    assert "×floor" in run(*command[:4], "--branches", "0", "--window", "32", "--rounds", "1").out


def test_round_of_a_mixture(run: Run, tmp_path: Path) -> None:
    checkpoint.write_tiny(llada2.FAMILY, tmp_path)
    command = ("bench", "round", "--model", str(tmp_path), "--device", "cpu", "--window", "32")
    command += ("--prefix", "40", "--rounds", "1")
    first, second = json.loads(run(*command, "--branches", "0,1", "--json").out)["rounds"]
    # Of 16 experts, of which a token reads 4.
    assert 4 <= first["touched_experts"] <= second["touched_experts"] <= 16
    assert "experts" in run(*command, "--branches", "0").out


def test_decode(run: Run) -> None:
    short = ("--limit", "2", "--max-new-tokens", "16", "--block-size", "8", "--branches", "2")
    found = json.loads(run("bench", "decode", *DUMMY, *short, "--json").out)
    assert found["prompts"] == 2
    assert found["tpf"] == found["tokens"] / found["rounds"]
    assert found["latency_ms_p50"] <= found["latency_ms_p95"] <= found["latency_ms_max"]
    assert found["settings"]["branches"] == 2
    shown = run("bench", "decode", *DUMMY, *short, "--together", "2").out
    assert "tokens per second" in shown
    assert "2 at once" in shown
    many = json.loads(run("bench", "decode", *DUMMY, *short, "--together", "2", "--json").out)
    assert many["together"]["tokens"] == found["tokens"]
    assert many["together"]["rounds"] == found["rounds"]
    assert many["together"]["times_one"] > 0


def test_bad_input(run: Run) -> None:
    assert "window 40 is not a multiple" in run("bench", "round", *DUMMY, "--window", "40").error
    assert "branches must be whole numbers" in run("bench", "round", "--branches", "x").error
    assert "no task 'x'" in run("bench", "decode", *DUMMY, "--task", "x").error
