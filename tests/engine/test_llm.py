from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

import goldens
from lopa import LLM, DecodeConfig, LopaError


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("dummy:dream-tiny", device="cpu")


SHORT = DecodeConfig(max_new_tokens=32, block_size=8)


@pytest.mark.parametrize("decoder", ["vanilla", "fast-dllm", "d2f", "lopa"])
def test_counts(llm: LLM, decoder: Any) -> None:
    output = llm.generate("Hello", DecodeConfig(decoder=decoder, max_new_tokens=32))
    assert output.tpf == output.tokens / output.rounds
    assert output.tpf_paper == output.tokens_paper / (output.rounds + 1)
    assert len(output.token_ids) == output.tokens
    assert 0 < output.first_round_seconds <= output.seconds
    summary = output.summary()
    names = "text token_ids rounds tpf tpf_paper tokens seconds tokens_per_second decoder settings"
    assert set(names.split()) <= set(summary)
    assert summary["settings"] == output.config.settings()


def test_kinds_of_prompts(llm: LLM) -> None:
    one = llm.generate("Hello", SHORT)
    assert llm.generate(llm.encode("Hello"), SHORT).text == one.text
    many = llm.generate(["Hello", "World"], SHORT)
    assert many[0].text == one.text
    by_ids = llm.generate([llm.encode("Hello"), llm.encode("World")], SHORT)
    assert [o.text for o in by_ids] == [o.text for o in many]


@pytest.mark.parametrize(
    ("prompt", "named"),
    [
        ("", "empty"),
        ([], "empty"),
        ([10**6], "outside the vocabulary"),
        ([1, 258], "contains the mask token"),
        ("x" * 5000, "context holds 4096"),
        ([{"role": "user", "content": "hi"}], "chat template"),
    ],
)
def test_bad_prompts(llm: LLM, prompt: Any, named: str) -> None:
    with pytest.raises(LopaError, match=named) as caught:
        llm.generate(prompt, SHORT)
    assert "\n" not in str(caught.value)


def test_a_model_without_a_tokenizer() -> None:
    llm = LLM(goldens.MODELS / "dream_0", device="cpu")
    assert llm.tokenizer is None
    output = llm.generate([1, 2, 3], SHORT)
    assert output.text == ""
    assert len(output.token_ids) > 0
    with pytest.raises(LopaError, match="no tokenizer"):
        llm.generate("Hello", SHORT)
    with pytest.raises(LopaError, match="stop strings need a tokenizer"):
        llm.generate([1], DecodeConfig(stop="x"))


def test_stop_strings(llm: LLM) -> None:
    full = llm.generate("Hello", SHORT).text
    stop = full[10:12]
    config = DecodeConfig(max_new_tokens=32, block_size=8, stop=(stop, "never there"))
    output = llm.generate("Hello", config)
    assert output.finish == "stop"
    assert output.text == full[: full.index(stop)]
    assert output.rounds <= llm.generate("Hello", SHORT).rounds
    streamed = "".join(event.text for event in llm.stream("Hello", config))
    assert streamed == output.text


def test_early_stop_and_parity() -> None:
    case = goldens.read(next(p for p in goldens.CASES if "lopa_eos" in p.stem))
    folder = goldens.MODELS / case["checkpoint"]
    llm = LLM(folder, device="cpu", eos_token_id=case["eos_token_id"])
    parity = goldens.parity_config(case)
    early = DecodeConfig(**{**parity.settings(), "early_stop": True})
    full, short = llm.generate(case["prompt_ids"], parity), llm.generate(case["prompt_ids"], early)
    end = case["first_eos_index"] + 1
    assert len(full.token_ids) == len(case["generated_ids"]) == full.tokens_paper
    assert full.tokens == short.tokens == end
    assert short.token_ids == full.token_ids[:end]
    assert short.rounds < full.rounds
    assert short.finish == full.finish == "eos"


def test_round_limit_gives_what_is_settled(llm: LLM) -> None:
    config = DecodeConfig(max_new_tokens=64, max_rounds=2)
    output = llm.generate("Hello", config)
    assert output.finish == "rounds"
    assert output.rounds == 2
    assert llm.config.mask_id not in output.token_ids


def test_seeds(llm: LLM) -> None:
    def text(seed: int) -> list[int]:
        config = DecodeConfig(max_new_tokens=32, block_size=8, temperature=1.0, seed=seed)
        return llm.generate("Hello", config).token_ids

    assert text(1) == text(1)
    assert text(1) != text(2)


def test_importing_is_light() -> None:
    """`import lopa` needs nothing but torch, safetensors and tokenizers, and not even those yet."""
    code = (
        "import sys, lopa; assert 'torch' not in sys.modules; lopa.LLM;"
        "heavy = {'jinja2', 'typer', 'rich', 'huggingface_hub', 'transformers', 'matplotlib'};"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
