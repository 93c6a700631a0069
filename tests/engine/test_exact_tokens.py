"""`accept="exact"` with models: the tokens of no branches on every golden, family and window."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import goldens
from lopa import LLM, DecodeConfig
from lopa.tasks import generate

PIPELINES = [path for path in goldens.CASES if goldens.read(path)["mode"] != "vanilla"]
WINDOWS: list[dict[str, Any]] = [
    {"block_size": 8},
    {"block_size": 8, "attention": "block"},
    {"window": "canvas"},
    {"window": "blocks", "block_size": 8, "cache": "none"},
    {"window": "blocks", "block_size": 8, "cache": "prefix"},
    {"window": "blocks", "block_size": 8, "cache": "dual"},
]


def exact(config: DecodeConfig, branches: int | str) -> DecodeConfig:
    more: dict[str, Any] = {"objective": "tpf"} if branches == "auto" else {}
    if config.decoder != "lopa":
        more["decoder"] = "lopa"
    return config.changed(accept="exact", branches=branches, **more)


def load(case: dict[str, Any]) -> LLM:
    return LLM(
        goldens.MODELS / case["checkpoint"],
        dtype="float32",
        device="cpu",
        eos_token_id=case["eos_token_id"],
        mask_token_id=case["mask_token_id"],
    )


@pytest.mark.parametrize("path", PIPELINES, ids=lambda p: p.stem)
def test_goldens(path: Path) -> None:
    """Against the published loop itself where it is D2F's, else against ours without branches."""
    case = goldens.read(path)
    llm, config = load(case), goldens.parity_config(case)
    expected = case["generated_ids"]
    rounds = case["forward_rounds"]
    if case["mode"] == "lopa":
        plain = llm.generate(case["prompt_ids"], config.changed(branches=0))
        expected, rounds = plain.token_ids, plain.rounds
    for branches in (2, "auto"):
        output = llm.generate(case["prompt_ids"], exact(config, branches))
        assert output.token_ids == expected
        assert output.rounds <= rounds


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize(
    ("model", "temperature"),
    [("dummy:dream-tiny", 0.0), ("dummy:dream-tiny", 0.8), (str(goldens.MODELS / "llada_a"), 0.8)],
)
def test_windows_alone_and_among_others(
    model: str, window: dict[str, Any], temperature: float
) -> None:
    llm = LLM(model, device="cpu", dtype="float32")
    prompts = [[5 + i + 3 * j for j in range(6 + i)] for i in range(4)]
    plain = llm.decode_config(
        branches=0, max_new_tokens=24, threshold=0.05, temperature=temperature, **window
    )
    alone = [llm.generate(prompt, plain) for prompt in prompts]
    for branches in (3, 7):
        together = llm.generate(prompts, exact(plain, branches))
        for output, expected in zip(together, alone, strict=True):
            assert output.token_ids == expected.token_ids
            assert output.rounds <= expected.rounds


@pytest.mark.engine
@pytest.mark.parametrize(
    ("task", "attention", "temperature"), [("words", "full", 0.0), ("functions", "block", 0.7)]
)
def test_built_in_tasks(task: str, attention: str, temperature: float) -> None:
    llm = LLM("tiny", device="cpu")
    prompt = generate(task, seed=4, split="eval").prompt
    plain = llm.decode_config(
        branches=0, max_new_tokens=96, attention=attention, temperature=temperature
    )
    expected = llm.generate(prompt, plain)
    output = llm.generate(prompt, exact(plain, 7))
    assert output.token_ids == expected.token_ids
    assert output.rounds < expected.rounds
