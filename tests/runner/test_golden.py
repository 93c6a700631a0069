"""Every golden run, round by round: tokens, winners, fills, commits, scores, block states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import goldens
from lopa import LLM, DecodeConfig, Output, Round
from lopa.config import DecodeConfig as Config
from lopa.models import checkpoint
from lopa.runner.statistics import statistics
from lopa.types import Plan
from reference_runner import ReferenceRunner


def run(path: Path) -> tuple[dict[str, Any], Output]:
    case = goldens.read(path)
    llm = LLM(
        goldens.MODELS / case["checkpoint"],
        dtype="float32",
        device="cpu",
        eos_token_id=case["eos_token_id"],
        mask_token_id=case["mask_token_id"],
    )
    return case, llm.generate(case["prompt_ids"], goldens.parity_config(case))


@pytest.mark.parametrize("path", goldens.CASES, ids=lambda p: p.stem)
def test_golden(path: Path) -> None:
    case, output = run(path)
    assert output.token_ids == case["generated_ids"]
    assert output.rounds == case["forward_rounds"] == len(case["trace"])
    if case["mode"] == "lopa":
        assert output.tpf_paper == pytest.approx(case["tpf_official"])
    for expected, record in zip(case["trace"], output.trace.rounds, strict=True):
        assert sorted(map(tuple, expected["filled"])) == [
            (f.position, f.token) for f in record.fills
        ]
        assert record.committed == expected.get("update_kvcache", 0)
        if case["mode"] == "lopa":
            check_lopa_round(expected, record)


def check_lopa_round(expected: dict[str, Any], record: Round) -> None:
    assert record.cached == expected["cache_len"]
    assert record.winner == expected["winner"]
    assert len(record.branches) == len(expected["branches"])
    for branch, golden in zip(record.branches, expected["branches"], strict=True):
        placed = [[ahead.position, ahead.token] for ahead in branch.lookaheads]
        assert placed == ([golden["lookahead"]] if golden["lookahead"] else [])
        assert not branch.refused
        assert branch.score == pytest.approx(golden["confidence"], abs=1e-4)
        assert branch.masks == golden["n_masks"]
        assert branch.end == golden["seq_len"]
        assert branch.eos == golden["eos_detected"]
    spawned = [ahead for (ahead,) in record.spawned]
    assert [(s.position, s.token) for s in spawned] == [
        (s["pos"], s["token"]) for s in expected["spawned_lookaheads"]
    ]
    for ahead, golden in zip(spawned, expected["spawned_lookaheads"], strict=True):
        assert ahead.confidence == pytest.approx(golden["confidence"], abs=1e-4)
    uncached = [
        (*b["range"], b["state"], b["masks"], b["fully_activated"])
        for b in expected["winner_blocks_at_start"].values()
        if b["state"] != "in_cache"
    ]
    assert uncached == [
        (b.start, b.end, "active" if b.state == "semi" else b.state, b.masks, b.state != "semi")
        for b in record.blocks
    ]


FORWARDS = sorted(p.parent for p in goldens.MODELS.glob("dream*/forward.safetensors"))


@pytest.mark.parametrize("folder", FORWARDS, ids=lambda p: p.name)
def test_forward_logits(folder: Path) -> None:
    golden = load_file(folder / "forward.safetensors")
    llm = LLM(folder, dtype="float32", device="cpu")
    ids = golden["input_ids"][0].tolist()
    full = llm.forward(ids)
    block = llm.forward(ids, attention="block", prompt_len=12, block_size=8)
    torch.testing.assert_close(full, golden["logits_full"][0], atol=1e-4, rtol=0)
    torch.testing.assert_close(block, golden["logits_block_causal"][0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("folder", FORWARDS, ids=lambda p: p.name)
def test_cached_forward(folder: Path) -> None:
    """Two cached rounds: prompt and a block, then the block again with the next one."""
    golden = load_file(folder / "forward.safetensors")
    config = checkpoint.read_config(folder)
    model = checkpoint.load(folder, config, device=torch.device("cpu"), dtype=torch.float32)
    runner = ReferenceRunner(model)
    settings = Config(ranking="max_prob")
    ids = golden["input_ids"][0].numpy()
    slot = runner.open(settings, len(ids))
    remembered = None
    for start, commit, end, name in ((0, 12, 20, "step1"), (12, 8, 28, "step2")):
        rows = ids[None, start:end]
        plan = Plan(
            index=1,
            start=start,
            cached=start,
            commit=commit,
            rows=rows,
            row_ends=rows[0, :1] * 0 + end,
            wanted=rows == rows,
            block_ids=None,
        )
        (stats,) = runner.forward([(slot, plan)])
        runner.commit([(slot, 0)])
        raw = golden[f"cached_{name}_logits"][0]
        first = raw[:1] if remembered is None else remembered
        positions = torch.arange(start, end)
        shifted = torch.cat([first, raw[:-1]])
        token, max_prob, _ = statistics(shifted, positions, config.mask_id, settings)
        assert stats.token.tolist() == token.tolist()
        torch.testing.assert_close(
            torch.from_numpy(stats.max_prob).float(), max_prob, atol=1e-5, rtol=0
        )
        remembered = raw[commit - 1 : commit]
    held = runner.cache
    for name, cache in (
        ("cache_k_layer0", held.keys[0, slot]),
        ("cache_v_layer_last", held.values[-1, slot]),
    ):
        expected = golden[name][0].transpose(0, 1)
        torch.testing.assert_close(cache[: len(expected)], expected, atol=1e-4, rtol=0)


LLADA_RUNS = goldens.read(goldens.LLADA / "case.json")["runs"]


def llada_config(run: dict[str, Any]) -> DecodeConfig:
    args, name = run["args"], run["name"]
    if name == "d2f_block_causal":
        return DecodeConfig(
            decoder="d2f",
            block_size=args["block_size"],
            max_new_tokens=args["max_new_tokens"],
            append_at=args["block_add_threshold"],
            activate_at=args["decoded_token_threshold"],
            threshold=args["skip_threshold"],
            ranking="max_prob",
            attention="block",
            early_stop=False,
        )
    rule = next(key for key in ("threshold", "factor", "steps") if key in args)
    return DecodeConfig(
        decoder="fast-dllm",
        block_size=args["block_length"],
        max_new_tokens=args["gen_length"],
        cache="prefix" if "prefix" in name else "dual" if "dual" in name else "none",
        early_stop=False,
        **{rule: args[rule]},
    )


@pytest.mark.parametrize("run", LLADA_RUNS, ids=lambda r: r["name"])
def test_llada_runs(run: dict[str, Any]) -> None:
    """Fast-dLLM's rules and caches, LLaDA's own sampler, D2F: on a model without shifted rows."""
    llm = LLM(goldens.LLADA, dtype="float32", device="cpu")
    output = llm.generate(run["prompt_ids"], llada_config(run))
    assert output.token_ids == run["generated_ids"]
    assert output.rounds == run["model_calls"]


def test_llada_forward_and_lora() -> None:
    golden = load_file(goldens.LLADA / "forward.safetensors")
    llm = LLM(goldens.LLADA, dtype="float32", device="cpu")
    ids = golden["input_ids"][0].tolist()
    block = llm.forward(ids, attention="block", prompt_len=12, block_size=8)
    # The published LLaDA layer rounds differently in fp32: 3e-4 apart on logits of some ten units.
    torch.testing.assert_close(llm.forward(ids), golden["logits_full"][0], atol=1e-3, rtol=0)
    torch.testing.assert_close(block, golden["logits_block_causal"][0], atol=1e-3, rtol=0)
    golden = load_file(goldens.LLADA / "lora" / "forward.safetensors")
    ids = golden["input_ids"][0].tolist()
    plain = llm.forward(ids)
    llm = LLM(goldens.LLADA, adapter=goldens.LLADA / "lora", dtype="float32", device="cpu")
    assert (plain - golden["logits_full"][0]).abs().max() > 1e-2  # the adapter does something
    torch.testing.assert_close(llm.forward(ids), golden["logits_full"][0], atol=1e-3, rtol=0)
