"""Backends and devices by name: what there is, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lopa import LLM
from lopa.errors import DeviceError, LopaError
from lopa.models.checkpoint import model_config
from lopa.runner import device as devices
from lopa.runner.attention import reference_batch
from lopa.runner.backend import why_not_triton
from lopa.runner.device import check_fits, default_cache_tokens


def test_backends_agree() -> None:
    plain, fast = (
        LLM("dummy:dream-tiny", device="cpu", dtype="float32", backend=name)
        for name in ("reference", "auto")
    )
    assert plain.runner.backend.attention is reference_batch
    assert fast.runner.backend.attention is not reference_batch
    config = plain.decode_config(branches=2, block_size=8, max_new_tokens=16)
    assert plain.generate("Hello", config).token_ids == fast.generate("Hello", config).token_ids


def test_backends_that_are_not_there() -> None:
    with pytest.raises(DeviceError, match=r"needs a CUDA device, and this one is cpu: choose"):
        LLM("dummy:dream-tiny", device="cpu", backend="triton")
    with pytest.raises(DeviceError, match="no backend 'fast': choose from auto, triton"):
        LLM("dummy:dream-tiny", device="cpu", backend="fast")


@pytest.mark.parametrize(
    ("name", "inner", "expected"),
    [
        ("llada2-mini", 512, None),
        ("llada2-flash", 1024, None),
        ("sdar-30b-a3b", 768, None),
        ("llada2-mini", 24, "experts of widths that 16 divides"),  # 48 bytes in bf16, 24 in fp8
    ],
)
def test_kernels_for_mixtures(name: str, inner: int, expected: str | None) -> None:
    pytest.importorskip("triton")
    config = model_config(f"dummy:{name}")
    assert config.mixture is not None
    config = replace(config, mixture=replace(config.mixture, inner=inner))
    reason = why_not_triton(config, torch.device("cuda"))
    assert (reason is None) if expected is None else (reason is not None and expected in reason)


def test_a_model_that_does_not_fit_says_how_much_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = LLM("dummy:dream-tiny", device="cpu", dtype="float32")
    cpu = torch.device("cpu")
    monkeypatch.setattr(devices, "free_bytes", lambda _: 2**10)
    with pytest.raises(DeviceError, match=r"takes .* GiB as float32 and cpu has .* too little"):
        check_fits(llm.config, cpu, torch.float32)
    assert default_cache_tokens(llm.config, cpu, torch.float32) >= 1
    monkeypatch.setattr(devices, "free_bytes", lambda _: None)  # the system does not say
    check_fits(llm.config, cpu, torch.float32)
    assert default_cache_tokens(llm.config, cpu, torch.float32) >= llm.config.max_positions


def test_bad_cache_size() -> None:
    with pytest.raises(LopaError, match="cache_tokens must be at least 1"):
        LLM("dummy:dream-tiny", device="cpu", cache_tokens=0)
