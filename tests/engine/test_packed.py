"""Linear layers that are packed as well: which ones, when there is room, and who takes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lopa import LLM
from lopa.engine import backend, packed
from lopa.engine.packed import PackedLinear, pack
from lopa.engine.quantize import quantize
from lopa.models.transformer import Transformer


class Fake:
    """In place of a packed weight."""

    def __init__(self, weight: Tensor, gated: bool) -> None:
        self.weight, self.gated = weight, gated

    @staticmethod
    def make(weight: Tensor, *, gated: bool) -> Fake | None:
        return Fake(weight, gated) if weight[0, 0] != 0 else None


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every weight has a plan, and memory is plenty."""
    monkeypatch.setattr(packed, "planned", lambda weight, gated: "a plan")
    monkeypatch.setattr(packed, "packed", Fake.make)
    monkeypatch.setattr(packed, "free_bytes", lambda device: 2**40)


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
    pack(this)
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
    pack(this)
    assert packed_parts(this) == []


def test_all_of_them_or_none(plans: None, monkeypatch: pytest.MonkeyPatch) -> None:
    this = model()
    size = 0
    for layer in this.layers:
        parts: Any = layer.attention.out, layer.feed_forward.gate_up, layer.feed_forward.down  # type: ignore
        size += sum(packed.packed_bytes(part.weight) for part in parts)
    size += packed.packed_bytes(this.head.weight)
    monkeypatch.setattr(packed, "free_bytes", lambda device: 4 * size - 1)
    pack(this)
    assert packed_parts(this) == []
    monkeypatch.setattr(packed, "free_bytes", lambda device: 4 * size)
    pack(this)
    assert len(packed_parts(this)) == 4


def test_no_plans_no_change() -> None:
    this = model()
    pack(this)
    assert packed_parts(this) == []


def test_only_for_a_step_that_takes_them(plans: None) -> None:
    llm = LLM("dummy:dream-tiny", device="cpu", dtype="float32")  # by plain torch
    assert packed_parts(llm.model) == []
    from lopa.engine.fused import FusedStep

    backend.prepare(llm.model, FusedStep)
    assert len(packed_parts(llm.model)) == 4
