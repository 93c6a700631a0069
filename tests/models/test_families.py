"""Families: their layouts, their logits against plain equations and published code, their loops."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from plain_layers import plain_logits
from safetensors.torch import load_file, save_file

import goldens
from lopa import LLM, DecodeConfig, LopaError
from lopa.config import DecoderName
from lopa.models import checkpoint
from lopa.models.families import FAMILIES
from lopa.models.family import Family
from lopa.presets import PAPER
from lopa.types import Plan
from reference_runner import ReferenceRunner

IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
every_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)


@pytest.fixture
def tiny(family: Family, tmp_path: Path) -> Path:
    checkpoint.write_tiny(family, tmp_path)
    return tmp_path


@every_family
def test_logits_are_those_of_the_plain_equations(tiny: Path, family: Family) -> None:
    llm = LLM(tiny, device="cpu")
    length = len(IDS)
    everything = np.ones((length, length), bool)
    found = llm.forward(IDS).numpy()
    np.testing.assert_allclose(found, plain_logits(tiny, IDS, everything), atol=1e-4)
    prompt = 0 if llm.config.trained_block else 3
    block = np.array([-1 if p < prompt else (p - prompt) // 4 for p in range(length)])
    sees = block[None, :] <= block[:, None]
    found = llm.forward(IDS, attention="block", prompt_len=3, block_size=4).numpy()
    np.testing.assert_allclose(found, plain_logits(tiny, IDS, sees), atol=1e-4)
    assert np.abs(found - llm.forward(IDS).numpy()).max() > 1e-2


@every_family
def test_round_trip(tiny: Path, family: Family) -> None:
    model = LLM(tiny, device="cpu").model
    stored = load_file(tiny / "model.safetensors")
    given = checkpoint.tensors(model)
    assert given.keys() == stored.keys()
    assert all(torch.equal(given[key], stored[key]) for key in stored)


@every_family
def test_every_decoder_that_fits(tiny: Path, family: Family) -> None:
    llm = LLM(tiny, device="cpu")
    prompt = [7, 8, 9, 10, 11]
    for decoder in family.decoders:
        config = llm.decode_config(decoder=decoder, max_new_tokens=32, early_stop=False)
        output = llm.generate(prompt, config)
        assert len(output.token_ids) >= 32
        assert llm.config.mask_id not in output.token_ids
        published = PAPER if decoder == "lopa" else {}  # as parity decodes
        early = llm.generate(
            prompt, llm.decode_config(decoder=decoder, max_new_tokens=32, **published)
        )
        assert len(early.token_ids) <= 32
        assert early.token_ids == output.token_ids[: len(early.token_ids)]
        assert early.rounds <= output.rounds
        if early.finish == "length":
            assert len(early.token_ids) == 32
    assert llm.session(prompt).config.decoder in family.decoders  # where nothing is asked for


@every_family
def test_decoders_that_do_not_fit(tiny: Path, family: Family) -> None:
    llm = LLM(tiny, device="cpu")
    for decoder in {*get_args(DecoderName)} - set(family.decoders):
        config = DecodeConfig(decoder=decoder, max_new_tokens=32)  # type: ignore[arg-type]
        with pytest.raises(LopaError, match=f"does not fit {family.name} models"):
            llm.generate([1, 2], config)
    if llm.config.trained_block:
        with pytest.raises(LopaError, match="block-causal"):
            llm.generate([1, 2], DecodeConfig(attention="full"))


@every_family
def test_a_missing_head_is_shared(tiny: Path, family: Family) -> None:
    tensors = load_file(tiny / "model.safetensors")
    head = next(k for k in tensors if k in ("lm_head.weight", "model.transformer.ff_out.weight"))
    del tensors[head]
    save_file(tensors, tiny / "model.safetensors")
    llm = LLM(tiny, device="cpu")
    assert llm.config.tied_head
    assert torch.isfinite(llm.forward(IDS)).all()


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("dream", "rope_scaling", {"type": "yarn"}),
        ("sdar", "use_sliding_window", True),
        ("sdar", "num_experts", 128),
        ("fast-dllm-v2", "hidden_act", "gelu"),
        ("llada", "alibi", True),
        ("llada", "block_group_size", 4),
        ("llada", "include_qkv_bias", True),
        ("llada", "rope", False),
        ("llada2", "score_function", "softmax"),
        ("llada2", "router_dtype", "bf16"),
        ("llada2", "use_bias", True),
        ("llada2", "norm_head", True),
        ("llada2", "rotary_dim", 6),
        ("llada2", "num_nextn_predict_layers", 1),
        ("llada2", "quantization_config", {"bits": 4}),
        ("sdar-moe", "use_sliding_window", True),
        ("sdar-moe", "shared_expert_intermediate_size", 64),
        ("sdar-moe", "decoder_sparse_step", 0),
        ("sdar-moe", "layer_types", ["sliding_attention"]),
    ],
)
def test_what_the_transformer_does_not_do_is_refused(
    tmp_path: Path, name: str, field: str, value: Any
) -> None:
    family = next(f for f in FAMILIES if f.name == name)
    checkpoint.write_tiny(family, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**family.tiny, field: value}))
    with pytest.raises(LopaError, match=field):
        LLM(tmp_path, device="cpu")


def test_no_family_is_named_outside_its_file() -> None:
    source = Path(checkpoint.__file__).parents[1]
    names = {f'"{family.name}"' for family in FAMILIES}
    names -= {'"sdar"', '"llada2"'}  # also decoders' names
    own = {family.read_config.__module__.split(".")[-1] + ".py" for family in FAMILIES}
    for path in source.rglob("*.py"):
        if path.name not in own:
            assert not any(name in path.read_text() for name in names), path


# -- published code ---------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "block"), [("sdar_a", 4), ("fastdllm2_a", 8)])
def test_published_logits(name: str, block: int) -> None:
    folder = goldens.MODELS / name
    golden = load_file(folder / "forward.safetensors")
    llm = LLM(folder, device="cpu", mask_token_id=198)
    ids = golden["input_ids"][0].tolist()
    close(llm.forward(ids), golden["logits_full"][0])
    causal = llm.forward(ids, attention="block", block_size=block)
    close(causal, golden["logits_block_causal"][0])


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=0)


def cached_hidden(
    llm: LLM, runner: ReferenceRunner, slot: int, row: list[int], start: int, **plan: Any
) -> torch.Tensor:
    """Raw rows of a cached forward through the runner."""
    rows = np.array([row])
    plan = {"cached": start, "commit": 0, "block_ids": None, **plan}
    made = Plan(
        index=1,
        start=start,
        rows=rows,
        row_ends=np.array([start + len(row)]),
        wanted=np.zeros_like(rows, bool),
        **plan,
    )
    runner.forward([(slot, made)])
    assert runner._staged is not None
    hidden = runner._staged.hidden[0]
    runner.commit([(slot, 0)])
    return llm.model.logits(hidden).float()


def test_sdar_cached_block() -> None:
    golden = load_file(goldens.MODELS / "sdar_a" / "forward.safetensors")
    llm = LLM(goldens.MODELS / "sdar_a", device="cpu")
    ids = golden["input_ids"][0].tolist()
    runner = ReferenceRunner(llm.model)
    slot = runner.open(DecodeConfig(), len(ids))
    cached_hidden(llm, runner, slot, ids[:12], 0, commit=12, block_ids=np.arange(12) // 4)
    found = cached_hidden(llm, runner, slot, ids[12:16], 12)
    close(found, golden["logits_cached_block"][0])


def test_fast_dllm_v2_cached_block() -> None:
    golden = load_file(goldens.MODELS / "fastdllm2_a" / "forward.safetensors")
    llm = LLM(goldens.MODELS / "fastdllm2_a", device="cpu", mask_token_id=198)
    ids = golden["input_ids"][0].tolist()
    runner = ReferenceRunner(llm.model)
    slot = runner.open(DecodeConfig(), len(ids))
    cached_hidden(llm, runner, slot, ids[:8], 0, commit=8)
    found = cached_hidden(llm, runner, slot, ids[8:16], 8, commit=8)
    close(found, golden["logits_block_step1"][0])
    # A part of the block again, over the block's own cached keys and values.
    part = golden["input_ids_subblock"][0].tolist()
    found = cached_hidden(llm, runner, slot, part, 12, cached=16)
    close(found, golden["logits_subblock_cached"][0])


def test_llada_cached_steps() -> None:
    golden = load_file(goldens.LLADA / "forward.safetensors")
    llm = LLM(goldens.LLADA, device="cpu")
    ids = golden["input_ids"][0].tolist()
    later = golden["input_ids_step2"][0].tolist()
    runner = ReferenceRunner(llm.model)
    slot = runner.open(DecodeConfig(), len(ids))
    cached_hidden(llm, runner, slot, ids, 0, commit=len(ids))
    found = cached_hidden(llm, runner, slot, later[12:], 12)
    close(found, golden["logits_prefix_cache_step2"][0])
    found = cached_hidden(llm, runner, slot, later[12:20], 12, cached=len(ids))
    close(found, golden["logits_dual_cache_step2"][0])


SDAR_RUNS = goldens.read(goldens.MODELS / "sdar_a" / "case.json")["runs"]


@pytest.mark.parametrize("run", SDAR_RUNS, ids=lambda r: r["name"])
def test_sdar_runs(run: dict[str, Any]) -> None:
    llm = LLM(goldens.MODELS / "sdar_a", device="cpu")
    args = run["args"]
    config = DecodeConfig(
        decoder="sdar",
        max_new_tokens=args["gen_length"],
        block_size=args["block_length"],
        steps=args["denoising_steps"],
        threshold=args.get("threshold", 1.0),
        order="sequential" if "remasking_strategy" in args else "confidence",
        early_stop=False,
    )
    output = llm.generate(run["prompt_ids"], config)
    assert output.token_ids == run["generated_ids"]
    # The published loop spends forwards of their own on storing the prompt and every block.
    prefill = len(run["prompt_ids"]) >= args["block_length"]
    overlap = len(run["prompt_ids"]) % args["block_length"]
    stores = -(-(overlap + args["gen_length"]) // args["block_length"])
    assert output.rounds == run["model_calls"] - prefill - stores


@pytest.mark.parametrize("branches", [0, 1, 3, 7])
@pytest.mark.parametrize("append_at", [0.25, 1.0])
def test_lopa_on_sdar(branches: int, append_at: float) -> None:
    """Within a block (append at 1) and across blocks."""
    llm = LLM(goldens.MODELS / "sdar_a", device="cpu")
    options = {"threshold": 0.85, "append_at": append_at, "max_new_tokens": 32, "early_stop": False}
    config = llm.decode_config(decoder="lopa", branches=branches, **options)
    output = llm.generate(SDAR_RUNS[0]["prompt_ids"], config)
    plain = llm.generate(SDAR_RUNS[0]["prompt_ids"], llm.decode_config(decoder="d2f", **options))
    assert output.rounds <= plain.rounds
    if branches == 0:
        assert output.token_ids == plain.token_ids
