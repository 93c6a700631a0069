"""Compressed linear layers: which ones, when memory suffices, and when they are used."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lopa import LLM
from lopa.engine import llm as llm_module
from lopa.kernels import compressed_linear
from lopa.kernels.compressed_linear import CompressedLinear, compress_linears
from lopa.kernels.quantize import quantize
from lopa.models.transformer import Transformer
from lopa.runner import backend, backend_triton
from lopa.runner import device as devices
from lopa.runner.attention import sdpa_batch
from lopa.runner.backend_torch import TorchBackend
from lopa.runner.backend_triton import TritonBackend
from lopa.runner.kv_cache import PAGE, pages_for, token_bytes

PLENTY = 2**40  # bytes


class Fake:
    """In place of a compressed weight."""

    def __init__(self, weight: Tensor, gated: bool) -> None:
        self.weight, self.gated = weight, gated

    def supports(self, x: Tensor) -> bool:
        return len(x) <= 64

    def __call__(self, x: Tensor) -> Tensor:
        assert self.supports(x)
        out = F.linear(x, self.weight)
        if not self.gated:
            return 2 * out  # so that its results are told apart
        gate, up = out.chunk(2, dim=1)
        return 2 * F.silu(gate) * up

    @staticmethod
    def make(weight: Tensor, *, gated: bool) -> Fake | None:
        return Fake(weight, gated) if weight[0, 0] != 0 else None


@pytest.fixture
def compressible(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every weight is."""
    monkeypatch.setattr(compressed_linear, "tiling_of", lambda weight, gated: "a tiling")
    monkeypatch.setattr(compressed_linear, "compress", Fake.make)


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

    def recorded(model: Transformer, backend: object, memory: int) -> None:
        given.append(memory)
        free[0] = 10**5

    monkeypatch.setattr(llm_module, "prepare", recorded)
    monkeypatch.setattr(llm_module, "check_fits", lambda *args: None)
    llm = LLM("dummy:dream-tiny", device="cpu", dtype="float32", cache_tokens=cache_tokens)
    each = token_bytes(llm.config, torch.float32)
    assert given == [10**6 - (cache_tokens or 0) * each]
    wanted = cache_tokens or 10**5 // 4 // each
    assert llm.runner.capacity == pages_for(wanted) * PAGE


@pytest.mark.parametrize(("tokens", "factor"), [(64, 2), (65, 1)])
def test_used_for_few_tokens(
    compressible: None, monkeypatch: pytest.MonkeyPatch, tokens: int, factor: int
) -> None:
    this = model()
    compress_linears(this, PLENTY)
    feed_forward: Any = this.layers[0].feed_forward
    backend: Any = SimpleNamespace(_table=lambda x, weight, bias=None: F.linear(x, weight, bias))
    backend._linear = partial(TritonBackend._linear, backend)

    def activate(gate_up: Tensor, kind: None) -> Tensor:  # the kernel wants a device
        gate, up = gate_up.chunk(2, dim=1)
        return F.silu(gate) * up

    monkeypatch.setattr(backend_triton.pointwise, "activate", activate)
    x = torch.randn(tokens, this.config.hidden_size)
    with torch.no_grad():
        gate, up = F.linear(x, feed_forward.gate_up.weight).chunk(2, dim=1)
        active: Any = TritonBackend._swiglu(backend, feed_forward, x)
        torch.testing.assert_close(active, factor * F.silu(gate) * up)
        for linear, given in ((feed_forward.down, active), (this.head, x)):
            found = TritonBackend._linear(backend, linear, given)
            torch.testing.assert_close(found, factor * F.linear(given, linear.weight))


@pytest.mark.parametrize("tied", [False, True])
def test_the_head_is_compressed(compressible: None, tied: bool) -> None:
    this = model()
    compress_linears(this, PLENTY)
    rows = torch.randn(5, this.config.hidden_size)
    if tied:
        this.config = replace(this.config, tied_head=True)
    backend: Any = SimpleNamespace(
        model=this, _table=lambda x, weight, bias=None: F.linear(x, weight, bias)
    )
    backend._linear = partial(TritonBackend._linear, backend)
    with torch.no_grad():
        weight = this.embedding.weight if tied else this.head.weight
        logits = TritonBackend._logits(backend, rows)
        torch.testing.assert_close(logits, (1 if tied else 2) * F.linear(rows, weight))
