from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

import goldens
from lopa import LLM, DecodeConfig, LopaError


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("dummy:dream-tiny", device="cpu")


SHORT = DecodeConfig(max_new_tokens=32, block_size=8)


@pytest.mark.parametrize("decoder", ["vanilla", "fast-dllm", "d2f", "lopa"])
def test_counts(llm: LLM, decoder: Any) -> None:
    output = llm.generate("Hello", DecodeConfig(decoder=decoder, max_new_tokens=32))
    assert len(output.token_ids) == output.tokens
    assert output.rounds == len(output.trace.rounds)
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
        ([10**6], "outside the vocabulary"),
        ([1, 258], "contains the mask token"),
        ("x" * 5000, "context holds 4096"),
        ([1, "x"], "must be a whole number"),
        ([1.5, 2], "must be a whole number"),
        ([True], "must be a whole number"),
        (None, "a prompt is text"),
        (5, "a prompt is text"),
        (b"bytes", "a prompt is text"),
        ({"role": "user", "content": "hi"}, "a prompt is text"),
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


def test_arrays_are_token_ids(llm: LLM) -> None:
    expected = llm.generate([72, 73], SHORT).token_ids
    assert llm.generate(np.array([72, 73]), SHORT).token_ids == expected  # type: ignore[call-overload]
    assert llm.generate(torch.tensor([72, 73]), SHORT).token_ids == expected  # type: ignore[call-overload]


def test_too_many_new_tokens_cost_no_memory(llm: LLM) -> None:
    with pytest.raises(LopaError, match="context holds"):
        llm.generate("Hello", DecodeConfig(max_new_tokens=2**60))


def test_a_stop_string_that_never_comes_changes_nothing(llm: LLM) -> None:
    options = {"max_new_tokens": 32, "block_size": 8, "early_stop": False}
    plain = llm.generate("Hello", DecodeConfig(**options))  # type: ignore[arg-type]
    stopped = llm.generate("Hello", DecodeConfig(**options, stop="never"))  # type: ignore[arg-type]
    assert stopped.token_ids == plain.token_ids


def test_only_what_was_filled_counts(llm: LLM) -> None:
    config = DecodeConfig(decoder="vanilla", max_new_tokens=64, steps=64, max_rounds=2)
    output = llm.generate("Hello", config)
    filled = sum(len(r.fills) for r in output.trace.rounds)
    assert output.tokens_paper == filled < 64


def test_a_failed_allocation_does_no_harm(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = LLM("dummy:dream-tiny", device="cpu")

    def fail(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as broken:
        broken.setattr(type(fresh.runner.backend), "forward", fail)
        with pytest.raises(MemoryError):
            fresh.generate("Hello", SHORT)
    assert fresh.runner.kv_cache.free_pages == fresh.runner.kv_cache.total_pages
    assert fresh.generate("Hello", SHORT).token_ids == llm.generate("Hello", SHORT).token_ids


def test_weights_that_are_not_numbers() -> None:
    broken = LLM("dummy:dream-tiny", device="cpu")
    broken.model.norm.weight.data.fill_(float("nan"))
    with pytest.raises(LopaError, match="logits are not numbers"):
        broken.generate("Hello", SHORT)


def test_bad_arguments(llm: LLM) -> None:
    with pytest.raises(LopaError, match="full or block"):
        llm.forward([1], attention="blok")  # type: ignore[arg-type]
    with pytest.raises(LopaError, match="block_size must be at least 1"):
        llm.forward([1], attention="block", prompt_len=1, block_size=0)
    with pytest.raises(LopaError, match="give 1 to"):
        llm.forward([])
    with pytest.raises(LopaError, match="max_running must be at least 1"):
        next(llm.generate_as_completed(["x"], SHORT, max_running=0))
    with pytest.raises(LopaError, match="both mask and EOS"):
        LLM("dummy:dream-tiny", device="cpu", eos_token_id=258)
    with pytest.raises(LopaError, match="must be a whole number"):
        LLM("dummy:dream-tiny", device="cpu", eos_token_id="x")  # type: ignore[arg-type]


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


@pytest.mark.parametrize("limit", [1, 5, 8, 30, 32])
def test_any_number_of_new_tokens_cuts_answer_and_rounds(llm: LLM, limit: int) -> None:
    config = DecodeConfig(max_new_tokens=32, block_size=8, branches=2, score="mean")  # does not end
    full = llm.generate("Hello", config, max_new_tokens=-(-limit // 8) * 8)  # whole blocks
    events = list(llm.stream("Hello", config, max_new_tokens=limit))
    output = events[-1].output
    assert output is not None
    assert output.token_ids == full.token_ids[:limit]
    assert (output.tokens, output.finish) == (limit, "length")
    assert "".join(event.text for event in events) == output.text
    assert output.rounds <= full.rounds
    longest = llm.generate("Hello", config)
    assert output.rounds < longest.rounds if limit <= 8 else output.rounds <= longest.rounds
