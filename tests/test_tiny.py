"""The built-in model: it is there, it fits, and it answers questions of its two kinds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lopa import LLM, DecodeConfig, tasks
from lopa.evaluation.evaluate import evaluate, problems
from lopa.evaluation.wilson import wilson
from lopa.models.files import BUILT_IN


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("tiny", device="cpu")


def test_size(llm: LLM) -> None:
    total = sum(path.stat().st_size for path in BUILT_IN["tiny"].iterdir())
    assert total <= 64e6
    assert 20e6 <= llm.config.parameters <= 60e6
    assert llm.dtype == torch.float32
    assert llm.config.shift


def test_words(llm: LLM) -> None:
    """Two of three: the measured accuracy is 97 %, so this fails only if something is broken.
    The recorded runs are of full attention."""
    config = DecodeConfig(decoder="d2f", max_new_tokens=128, attention="block")
    report, samples = evaluate(llm, "words", config, split="eval", limit=3, seed=1, batch_size=3)
    assert report["correct"] >= 2
    assert report["unfinished"] == 0
    assert report["tpf"] > 1.5
    assert all("####" in sample.text for sample in samples)


def test_functions(llm: LLM) -> None:
    config = DecodeConfig(decoder="d2f", max_new_tokens=128)
    report, _ = evaluate(llm, "functions", config, split="eval", limit=3, seed=1, batch_size=3)
    assert report["correct"] >= 2


@pytest.mark.parametrize(
    ("options", "shapes"),
    [
        ({"branches": 3}, [{"temperature": 1e-3}, {"top_p": 1e-6}]),
        ({"decoder": "d2f"}, [{"top_k": 1}]),
    ],
)
def test_the_coldest_samples_are_greedy(
    llm: LLM, options: dict[str, Any], shapes: list[dict[str, float]]
) -> None:
    """Round by round: the confidences are greedy decoding's too."""
    config = DecodeConfig(max_new_tokens=32, block_size=16, seed=5, **options)
    prompt = tasks.generate("words", 1, "eval").prompt
    expected = llm.generate(prompt, config)
    for shape in shapes:
        output = llm.generate(prompt, config.changed(**{"temperature": 1.0, **shape}))
        assert output.token_ids == expected.token_ids
        for ours, theirs in zip(output.trace.rounds, expected.trace.rounds, strict=True):
            assert (ours.winner, ours.fills) == (theirs.winner, theirs.fills)


def test_the_tokenizer_splits_digits(llm: LLM) -> None:
    assert llm.tokenizer is not None
    pieces = [llm.tokenizer.piece(i) for i in llm.tokenizer.encode("1234 = 12")]
    assert [p for p in pieces if p.strip().isdigit()] == list("123412")


def test_problems_are_fixed_by_their_seed() -> None:
    assert problems("words", "eval", 5, 1) == problems("words", "eval", 5, 1)
    assert problems("words", "eval", 5, 1)[:3] == problems("words", "eval", 3, 1)
    assert problems("words", "eval", 5, 1) != problems("words", "eval", 5, 2)


def test_wilson_interval() -> None:
    """Figures of Wilson's interval from a published table: 8 of 10 at 95 %."""
    low, high = wilson(8, 10)
    assert (low, high) == (pytest.approx(0.4902, abs=1e-3), pytest.approx(0.9433, abs=1e-3))
    assert wilson(0, 10)[0] == 0.0
    assert wilson(10, 10)[1] == pytest.approx(1.0)
