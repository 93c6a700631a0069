"""Compressed linear layers: which ones, and when memory suffices."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cuda_support import FakeCompressed
from torch import Tensor

from lopa import LLM
from lopa.engine import llm as llm_module
from lopa.engine import loader
from lopa.kernels import compressed_linear
from lopa.kernels.compressed_linear import CompressedLinear, compress_linears
from lopa.kernels.quantize import quantize
from lopa.models.transformer import Transformer
from lopa.runner import backend
from lopa.runner import device as devices
from lopa.runner.attention import sdpa_batch
from lopa.runner.backend_torch import TorchBackend
from lopa.runner.backend_triton import TritonBackend
from lopa.runner.kv_cache import PAGE, pages_for, token_bytes

PLENTY = 2**40  # bytes


def fake_compress(weight: Tensor, *, gated: bool) -> FakeCompressed | None:
    return FakeCompressed(weight, gated) if weight[0, 0] != 0 else None


@pytest.fixture
def compressible(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every weight is."""
    monkeypatch.setattr(compressed_linear, "tiling_of", lambda weight, gated: "a tiling")
    monkeypatch.setattr(compressed_linear, "compress", fake_compress)


def model() -> Transformer:
    return LLM("dummy:dream-tiny", device="cpu", dtype="float32").model


def kinds(model: Transformer) -> dict[str, Any]:
    layer: Any = model.layers[1]
    return {
        "qkv": layer.attention.qkv,
        "out": layer.attention.out,
        "gate_up": layer.feed_forward.gate_up,
        "down": layer.feed_forward.down,
        "head": model.head,
    }


def compressed_parts(model: Transformer) -> list[str]:
    return [name for name, linear in kinds(model).items() if isinstance(linear, CompressedLinear)]


def test_layers_without_bias(compressible: None) -> None:
    this = model()
    before = {name: linear.weight for name, linear in kinds(this).items()}
    size = sum(parameter.numel() for parameter in this.parameters())
    compress_linears(this, PLENTY)
    assert compressed_parts(this) == ["out", "gate_up", "down", "head"]
    for name, linear in kinds(this).items():
        assert linear.weight is before[name]
        if name != "qkv":
            assert linear.compressed.weight is linear.weight
            assert linear.compressed.gated == (name == "gate_up")
    assert sum(parameter.numel() for parameter in this.parameters()) == size
    x = torch.randn(3, this.config.hidden_size)
    torch.testing.assert_close(this.head(x), F.linear(x, before["head"]))


def test_neither_quantized_nor_incompressible_layers(compressible: None) -> None:
    this = model()
    quantize(this, "int8")
    with torch.no_grad():
        this.head.weight[0, 0] = 0
    compress_linears(this, PLENTY)
    assert compressed_parts(this) == []


def test_all_of_them_or_none(compressible: None) -> None:
    this = model()
    size = 0
    for layer in this.layers:
        parts: Any = layer.attention.out, layer.feed_forward.gate_up, layer.feed_forward.down  # type: ignore
        size += sum(compressed_linear.compressed_bytes(part.weight) for part in parts)
    size += compressed_linear.compressed_bytes(this.head.weight)
    compress_linears(this, 4 * size - 1)
    assert compressed_parts(this) == []
    compress_linears(this, 4 * size)
    assert len(compressed_parts(this)) == 4


def test_without_tilings_nothing_changes() -> None:
    this = model()
    compress_linears(this, PLENTY)
    assert compressed_parts(this) == []


def test_only_for_a_backend_that_reads_them(compressible: None) -> None:
    this = model()
    backend.prepare(this, partial(TorchBackend, attention=sdpa_batch), PLENTY)
    backend.prepare(this, TorchBackend, PLENTY)
    assert compressed_parts(this) == []
    backend.prepare(this, partial(TritonBackend, graphs=False), PLENTY)
    assert len(compressed_parts(this)) == 4


@pytest.mark.parametrize("cache_tokens", [None, 1000])
def test_before_the_cache_has_its_memory(
    cache_tokens: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The size that was asked for is left to it; else it gets a part of what compression leaves."""
    free = [10**6]
    given: list[int] = []
    monkeypatch.setattr(devices, "free_bytes", lambda device: free[0])

    def recorded(model: Transformer, backend: object, memory: int, compiling: object) -> None:
        given.append(memory)
        free[0] = 10**5

    monkeypatch.setattr(loader, "prepare", recorded)
    monkeypatch.setattr(llm_module, "check_fits", lambda *args: None)
    llm = LLM("dummy:dream-tiny", device="cpu", dtype="float32", cache_tokens=cache_tokens)
    each = token_bytes(llm.config, torch.float32)
    assert given == [10**6 - (cache_tokens or 0) * each]
    wanted = cache_tokens or 10**5 // 4 // each
    assert llm.runner.capacity == pages_for(wanted) * PAGE
