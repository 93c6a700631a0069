"""Linear layers that are packed as well: which ones, when there is room, and who takes them."""

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
from lopa.kernels import compressed_linear as packed
from lopa.kernels.compressed_linear import PackedLinear, pack
from lopa.kernels.quantize import quantize
from lopa.models.transformer import Transformer
from lopa.runner import backend
from lopa.runner import backend_triton as fused
from lopa.runner import device as devices
from lopa.runner.attention import sdpa_batch
from lopa.runner.backend_torch import Step
from lopa.runner.backend_triton import FusedStep
from lopa.runner.kv_cache import PAGE, pages_for, token_bytes

PLENTY = 2**40  # bytes


class Fake:
    """In place of a packed weight."""

    def __init__(self, weight: Tensor, gated: bool) -> None:
        self.weight, self.gated = weight, gated

    def suits(self, x: Tensor) -> bool:
        return len(x) <= 64

    def __call__(self, x: Tensor) -> Tensor:
        assert self.suits(x)
        out = F.linear(x, self.weight)
        if not self.gated:
            return 2 * out  # so that it is seen who made it
        gate, up = out.chunk(2, dim=1)
        return 2 * F.silu(gate) * up

    @staticmethod
    def make(weight: Tensor, *, gated: bool) -> Fake | None:
        return Fake(weight, gated) if weight[0, 0] != 0 else None


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every weight has one."""
    monkeypatch.setattr(packed, "planned", lambda weight, gated: "a plan")
    monkeypatch.setattr(packed, "packed", Fake.make)


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


def packed_parts(model: Transformer) -> list[str]:
    return [name for name, linear in kinds(model).items() if isinstance(linear, PackedLinear)]


def test_layers_without_bias(plans: None) -> None:
    this = model()
    before = {name: linear.weight for name, linear in kinds(this).items()}
    size = sum(parameter.numel() for parameter in this.parameters())
    pack(this, PLENTY)
    assert packed_parts(this) == ["out", "gate_up", "down", "head"]
    for name, linear in kinds(this).items():
        assert linear.weight is before[name]
        if name != "qkv":
            assert linear.packed.weight is linear.weight
            assert linear.packed.gated == (name == "gate_up")
    assert sum(parameter.numel() for parameter in this.parameters()) == size
    x = torch.randn(3, this.config.hidden_size)
    torch.testing.assert_close(this.head(x), F.linear(x, before["head"]))


def test_not_what_is_quantised_or_cannot_be_told(plans: None) -> None:
    this = model()
    quantize(this, "int8")
    with torch.no_grad():
        this.head.weight[0, 0] = 0
    pack(this, PLENTY)
    assert packed_parts(this) == []


def test_all_of_them_or_none(plans: None) -> None:
    this = model()
    size = 0
    for layer in this.layers:
        parts: Any = layer.attention.out, layer.feed_forward.gate_up, layer.feed_forward.down  # type: ignore
        size += sum(packed.packed_bytes(part.weight) for part in parts)
    size += packed.packed_bytes(this.head.weight)
    pack(this, 4 * size - 1)
    assert packed_parts(this) == []
    pack(this, 4 * size)
    assert len(packed_parts(this)) == 4


def test_no_plans_no_change() -> None:
    this = model()
    pack(this, PLENTY)
    assert packed_parts(this) == []


def test_only_for_a_step_that_takes_them(plans: None) -> None:
    this = model()
    backend.prepare(this, partial(Step, attention=sdpa_batch), PLENTY)
    backend.prepare(this, Step, PLENTY)
    assert packed_parts(this) == []
    backend.prepare(this, partial(FusedStep, graphs=False), PLENTY)
    assert len(packed_parts(this)) == 4


@pytest.mark.parametrize("cache_tokens", [None, 1000])
def test_before_the_cache_has_its_memory(
    cache_tokens: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it was promised is left to it; else it takes a part of what packing has left."""
    free = [10**6]
    rooms: list[int] = []
    monkeypatch.setattr(devices, "free_bytes", lambda device: free[0])

    def noted(model: Transformer, step: object, room: int) -> None:
        rooms.append(room)
        free[0] = 10**5

    monkeypatch.setattr(llm_module, "prepare", noted)
    monkeypatch.setattr(llm_module, "check_fits", lambda *given: None)
    llm = LLM("dummy:dream-tiny", device="cpu", dtype="float32", cache_tokens=cache_tokens)
    each = token_bytes(llm.config, torch.float32)
    assert rooms == [10**6 - (cache_tokens or 0) * each]
    wanted = cache_tokens or 10**5 // 4 // each
    assert llm.runner.room == pages_for(wanted) * PAGE


@pytest.mark.parametrize(("tokens", "factor"), [(64, 2), (65, 1)])
def test_a_step_takes_them_for_few_tokens(
    plans: None, monkeypatch: pytest.MonkeyPatch, tokens: int, factor: int
) -> None:
    this = model()
    pack(this, PLENTY)
    feed_forward: Any = this.layers[0].feed_forward
    step: Any = SimpleNamespace(_products=lambda x, weight, bias=None: F.linear(x, weight, bias))
    step._product = partial(FusedStep._product, step)

    def activate(gate_up: Tensor, kind: None) -> Tensor:  # the kernel wants a device
        gate, up = gate_up.chunk(2, dim=1)
        return F.silu(gate) * up

    monkeypatch.setattr(fused.pointwise, "activate", activate)
    x = torch.randn(tokens, this.config.hidden_size)
    with torch.no_grad():
        gate, up = F.linear(x, feed_forward.gate_up.weight).chunk(2, dim=1)
        active: Any = FusedStep._activated(step, feed_forward, x)
        torch.testing.assert_close(active, factor * F.silu(gate) * up)
        for linear, given in ((feed_forward.down, active), (this.head, x)):
            found = FusedStep._product(step, linear, given)
            torch.testing.assert_close(found, factor * F.linear(given, linear.weight))


@pytest.mark.parametrize("tied", [False, True])
def test_the_head_is_taken_packed(plans: None, tied: bool) -> None:
    this = model()
    pack(this, PLENTY)
    rows = torch.randn(5, this.config.hidden_size)
    if tied:
        this.config = replace(this.config, tied_head=True)
    step: Any = SimpleNamespace(
        model=this, _products=lambda x, weight, bias=None: F.linear(x, weight, bias)
    )
    step._product = partial(FusedStep._product, step)
    with torch.no_grad():
        weight = this.embedding.weight if tied else this.head.weight
        logits = FusedStep._logits(step, rows)
        torch.testing.assert_close(logits, (1 if tied else 2) * F.linear(rows, weight))
