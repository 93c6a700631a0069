"""Mixtures of experts: against published code, against plain equations, and in every layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plain_layers import plain_logits
from safetensors.torch import load_file, save_file
from test_families import cached_hidden, close

import goldens
from lopa import LLM, DecodeConfig, LopaError, Output
from lopa.models import checkpoint, llada2, sdar_moe
from lopa.models.families import FAMILIES
from lopa.models.mixture import Mixture, Router
from reference_runner import ReferenceRunner

NAMES = ("llada2_a", "llada21_a", "sdarmoe_a")
CASES = {name: goldens.read(goldens.MODELS / name / "case.json") for name in NAMES}
RUNS = [
    pytest.param(name, run, id=f"{name}-{run['name']}")
    for name, case in CASES.items()
    for run in case["runs"]
]


@pytest.fixture(scope="module")
def models() -> dict[str, LLM]:
    return {
        name: LLM(
            goldens.MODELS / name,
            device="cpu",
            mask_token_id=case["mask_token_id"],
            eos_token_id=case["eos_token_id"],
        )
        for name, case in CASES.items()
    }


# -- logits -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "block"), [("llada2_a", 32), ("llada21_a", 16), ("sdarmoe_a", 4)])
def test_published_logits(models: dict[str, LLM], name: str, block: int) -> None:
    golden, llm = load_file(goldens.MODELS / name / "forward.safetensors"), models[name]
    ids = golden["input_ids"][0].tolist()
    close(llm.forward(ids), golden["logits_full"][0])
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    hooks = [
        module.register_forward_hook(lambda _m, _i, out: found.append(out))
        for module in llm.model.modules()
        if isinstance(module, Router)
    ]
    causal = llm.forward(ids, attention="block", block_size=block)
    for hook in hooks:
        hook.remove()
    close(causal, golden["logits_block_causal"][0])
    chosen = golden["router_topk_idx_block_causal"]
    assert len(found) == len(chosen)
    for layer, (experts, weights) in enumerate(found):
        order = experts.argsort(dim=-1)  # the fixture has them in ascending order
        assert experts.gather(1, order).tolist() == chosen[layer].tolist()
        expected = golden["router_topk_weight_block_causal"][layer]
        torch.testing.assert_close(weights.gather(1, order), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("name", "block", "start"), [("llada2_a", 32, 32), ("llada21_a", 16, 32), ("sdarmoe_a", 4, 12)]
)
def test_published_cached_block(models: dict[str, LLM], name: str, block: int, start: int) -> None:
    golden, llm = load_file(goldens.MODELS / name / "forward.safetensors"), models[name]
    ids = golden["input_ids"][0].tolist()
    runner = ReferenceRunner(llm.model)
    slot = runner.open(DecodeConfig(), len(ids))
    blocks = np.arange(start) // block
    cached_hidden(llm, runner, slot, ids[:start], 0, commit=start, block_ids=blocks)
    found = cached_hidden(llm, runner, slot, ids[start : start + block], start)
    close(found, golden["logits_cached_block"][0])


IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
VARIANTS: list[tuple[Any, dict[str, Any]]] = [
    (llada2, {"n_group": 1, "topk_group": 1}),
    (llada2, {"n_group": 8, "topk_group": 5, "num_experts_per_tok": 7}),
    (llada2, {"n_group": 2, "topk_group": 1, "num_experts_per_tok": 1}),
    (llada2, {"first_k_dense_replace": 0, "num_shared_experts": 0}),
    (llada2, {"first_k_dense_replace": 2, "num_shared_experts": 3}),
    (llada2, {"first_k_dense_replace": 3}),  # all of them
    (llada2, {"norm_topk_prob": False, "routed_scaling_factor": 1.0}),
    (llada2, {"moe_router_enable_expert_bias": False}),
    (llada2, {"partial_rotary_factor": 0.25, "rotary_dim": 4}),
    (llada2, {"partial_rotary_factor": 1.0, "rotary_dim": 16, "num_key_value_heads": 1}),
    (llada2, {"head_dim": 24, "rotary_dim": None}),
    (llada2, {"use_qkv_bias": True, "tie_word_embeddings": True}),
    (sdar_moe, {"norm_topk_prob": False}),
    (sdar_moe, {"mlp_only_layers": [], "num_experts_per_tok": 1}),
    (sdar_moe, {"mlp_only_layers": [0], "decoder_sparse_step": 2, "num_hidden_layers": 5}),
    (sdar_moe, {"num_experts": 3, "num_experts_per_tok": 3, "attention_bias": True}),
]


@pytest.mark.parametrize(("module", "changes"), VARIANTS, ids=str)
def test_every_option_is_that_of_the_plain_equations(
    tmp_path: Path, module: Any, changes: dict[str, Any]
) -> None:
    raw = {**module.FAMILY.tiny, **changes}
    config = module.read_config(raw)
    model = checkpoint.dummy(config, device=torch.device("cpu"), dtype=torch.float32, seed=1)
    stored = {key: tensor.contiguous() for key, tensor in checkpoint.tensors(model).items()}
    for key, tensor in stored.items():
        if key.endswith("bias"):
            tensor.normal_(0.0, 0.1, generator=torch.Generator().manual_seed(len(key)))
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(raw))
    llm = LLM(tmp_path, device="cpu")
    everything = np.ones((len(IDS), len(IDS)), bool)
    expected = plain_logits(tmp_path, IDS, everything)
    np.testing.assert_allclose(llm.forward(IDS).numpy(), expected, atol=1e-4)
    assert llm.config.parameters == sum(tensor.numel() for tensor in stored.values())


@pytest.mark.parametrize(
    "changes",
    [
        {"n_group": 3},
        {"topk_group": 5},
        {"n_group": 16, "topk_group": 4},  # of one expert each
        {"num_experts_per_tok": 9},  # where two groups have eight
        {"num_experts": 0},
        {"partial_rotary_factor": 0.2, "rotary_dim": None},
        {"partial_rotary_factor": 2.0, "rotary_dim": None},
    ],
    ids=str,
)
def test_experts_that_cannot_be_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(LopaError, match=r"^config\.json: "):
        llada2.read_config({**llada2.FAMILY.tiny, **changes})


def test_sizes_are_those_published() -> None:
    shapes = {name: shape for family in FAMILIES for name, shape in family.shapes.items()}
    total = {name: round(shapes[name].parameters / 1e9, 1) for name in shapes}
    assert total["llada2-mini"] == 16.3
    assert total["llada2-flash"] == 102.9
    assert total["sdar-30b-a3b"] == 30.5


# -- precision --------------------------------------------------------------------------------


@pytest.mark.parametrize("module", [llada2, sdar_moe])
def test_routers_compute_in_fp32(tmp_path: Path, module: Any) -> None:
    """In bf16 the router takes bf16 activations, and nothing else is rounded."""
    checkpoint.write_tiny(module.FAMILY, tmp_path)
    wide = LLM(tmp_path, device="cpu").model
    narrow = LLM(tmp_path, device="cpu", dtype="bfloat16").model
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    for layer, other in zip(wide.layers, narrow.layers, strict=True):
        if not isinstance(layer.feed_forward, Mixture):
            continue
        assert isinstance(other.feed_forward, Mixture)
        assert other.feed_forward.router.weight.dtype == torch.float32
        for found, expected in zip(
            other.feed_forward.router(x), layer.feed_forward.router(x.float()), strict=True
        ):
            assert torch.equal(found, expected)
        out = other.feed_forward(x)
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out.float(), layer.feed_forward(x.float()), atol=0.1, rtol=0.05)


# -- layouts ----------------------------------------------------------------------------------


def test_stacked_experts(tmp_path: Path) -> None:
    """As the trainer of LLaDA2 saves them."""
    checkpoint.write_tiny(llada2.FAMILY, tmp_path)
    expected = LLM(tmp_path, device="cpu").forward(IDS)
    stored = load_file(tmp_path / "model.safetensors")
    experts = [key for key in stored if ".mlp.experts." in key]
    for layer in (1, 2):
        for part in ("gate_proj", "up_proj", "down_proj"):
            name = f"model.layers.{layer}.mlp.experts.{{}}{part}"
            each = [stored[name.format(f"{e}.") + ".weight"] for e in range(16)]
            stored[name.format("")] = torch.stack(each)
    save_file({k: v for k, v in stored.items() if k not in experts}, tmp_path / "model.safetensors")
    assert torch.equal(LLM(tmp_path, device="cpu").forward(IDS), expected)


def test_the_tensors_tell_of_norms(tmp_path: Path) -> None:
    """LLaDA2's trainer writes use_qk_norm false, and normalises."""
    checkpoint.write_tiny(llada2.FAMILY, tmp_path)
    expected = LLM(tmp_path, device="cpu").forward(IDS)
    raw = {**llada2.FAMILY.tiny, "use_qk_norm": False}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    llm = LLM(tmp_path, device="cpu")
    assert llm.config.qk_norm
    assert torch.equal(llm.forward(IDS), expected)


def test_a_copy_that_says_it_edits_does() -> None:
    raw = {**llada2.FAMILY.tiny, "model_type": "llada21_moe"}
    for given, expected in ((raw, 0.9), (llada2.FAMILY.tiny, None)):
        config = llada2.read_config(given)
        assert llada2.FAMILY.defaults(config, None).get("edit_threshold") == expected
        assert llada2.FAMILY.defaults(config, "lopa").get("edit_threshold") == expected
        assert "edit_threshold" not in llada2.FAMILY.defaults(config, "d2f")


# -- published runs ---------------------------------------------------------------------------


def rule(run: dict[str, Any]) -> dict[str, Any]:
    """What a published call says of filling, as options of `lopa` and `sdar`."""
    args = run["args"]
    if "editing_threshold" in args:
        return {
            "threshold": args["threshold"],
            "edit_threshold": args["editing_threshold"],
            "edit_rounds": args.get("max_post_steps", 16),
            "quota": args.get("num_to_transfer", 1),
        }
    if "denoising_steps" in args:
        return {"threshold": args.get("threshold", 1.0), "steps": args["denoising_steps"]}
    steps = args["steps"]
    if not is_cached(run):  # that loop takes its steps as they are
        steps = min(steps, args["gen_length"] // args.get("minimal_topk", 1))
    return {"threshold": args["threshold"], "steps": steps}


def is_cached(run: dict[str, Any]) -> bool:
    return bool(run["name"].startswith("cached_"))


def own_config(run: dict[str, Any]) -> DecodeConfig:
    """The published loop's own decoder."""
    args = run["args"]
    common = {"max_new_tokens": args["gen_length"], "block_size": args["block_length"]}
    early = args.get("eos_early_stop", False)
    if "denoising_steps" in args:
        order = "sequential" if "remasking_strategy" in args else "confidence"
        return DecodeConfig(decoder="sdar", order=order, early_stop=False, **common, **rule(run))
    if "editing_threshold" in args:
        return DecodeConfig(decoder="llada2", early_stop=early, **common, **rule(run))
    if is_cached(run) and args["gen_length"] < args["steps"]:
        return DecodeConfig(decoder="sdar", early_stop=early, **common, **rule(run))
    return DecodeConfig(
        decoder="llada2",
        threshold=args["threshold"],
        steps=args["steps"],
        quota=args.get("minimal_topk", 1),
        early_stop=early,
        **common,
    )


def without_rest(run: dict[str, Any], name: str) -> list[int]:
    """SDAR's loop leaves masks where it stopped."""
    return [i for i in run["generated_ids"] if i != CASES[name]["mask_token_id"]]


@pytest.mark.parametrize(("name", "run"), RUNS)
def test_published_runs(models: dict[str, LLM], name: str, run: dict[str, Any]) -> None:
    output = models[name].generate(run["prompt_ids"], own_config(run))
    expected = without_rest(run, name)
    assert output.token_ids[: len(expected)] == expected
    if output.config.decoder == "llada2" or name == "sdarmoe_a":  # else in whole blocks
        assert output.token_ids == expected
    assert output.rounds == run["forwards"]
    assert edits_of(output) == run.get("edits", 0)
    if "post_passes" in run:
        assert post_passes(output) == run["post_passes"]


def edits_of(output: Output) -> int:
    return sum(fill.kind == "edited" for r in output.trace.rounds for fill in r.fills)


def post_passes(output: Output) -> list[int]:
    """Of each block, the rounds that found it without masks."""
    found: dict[int, int] = {}
    for record in output.trace.rounds:
        block = record.blocks[-1]
        found[block.start] = found.get(block.start, 0) + (block.masks == 0)
    return list(found.values())


def lopa_config(run: dict[str, Any], **more: Any) -> DecodeConfig:
    args = run["args"]
    return DecodeConfig(
        decoder="lopa",
        ranking="max_prob",
        max_new_tokens=args["gen_length"],
        block_size=args["block_length"],
        append_at=1.0,
        activate_at=1.0,
        attention="block",
        **rule(run),
        **more,
    )


@pytest.mark.parametrize(("name", "run"), [r for r in RUNS if "sequential" not in str(r.id)])
def test_no_branches_are_the_published_loop(
    models: dict[str, LLM], name: str, run: dict[str, Any]
) -> None:
    output = models[name].generate(run["prompt_ids"], lopa_config(run, branches=0))
    expected = without_rest(run, name)[: run["args"]["gen_length"]]
    first = [i for i, token in enumerate(expected) if token == CASES[name]["eos_token_id"]]
    assert output.token_ids == expected[: first[0] + 1 if first else None]


@pytest.mark.parametrize(
    ("branches", "append_at"),
    [(1, 1.0), (3, 0.25), pytest.param(7, 0.25, marks=pytest.mark.engine)],
)
@pytest.mark.parametrize("name", NAMES)
def test_lookahead(models: dict[str, LLM], name: str, append_at: float, branches: int) -> None:
    """Within a block and across blocks, with editing where the model has it."""
    llm, mask = models[name], CASES[name]["mask_token_id"]
    rounds = plain_rounds = 0
    for run in CASES[name]["runs"][:2]:
        config = lopa_config(run, branches=branches).changed(append_at=append_at)
        output = llm.generate(run["prompt_ids"], config)
        assert mask not in output.token_ids
        assert output.finish == "eos" or len(output.token_ids) == config.max_new_tokens
        plain = llm.generate(run["prompt_ids"], config.changed(branches=0))
        if branches == 3:
            exact = llm.generate(run["prompt_ids"], config.changed(accept="exact"))
            assert exact.token_ids == plain.token_ids
            assert exact.rounds <= plain.rounds
        rounds, plain_rounds = rounds + output.rounds, plain_rounds + plain.rounds
    if name != "llada21_a":  # random weights edit on and on, and that decides its rounds
        assert rounds <= plain_rounds


@pytest.mark.parametrize("name", NAMES)
def test_many_at_once(models: dict[str, LLM], name: str) -> None:
    """Tokens do not depend on what else is decoded."""
    llm, runs = models[name], CASES[name]["runs"][:3]
    prompts = [run["prompt_ids"] for run in runs]
    configs = [lopa_config(run, branches=k) for run, k in zip(runs, (0, 3, 7), strict=True)]
    together = llm.generate(prompts, configs)
    alone = [llm.generate(p, c) for p, c in zip(prompts, configs, strict=True)]
    assert [o.token_ids for o in together] == [o.token_ids for o in alone]
