"""Quantized layers: close to what they replace, and refused where they cannot run."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from lopa import LLM
from lopa.errors import DeviceError
from lopa.evaluation.scoring import score
from lopa.kernels.quantize import PARTS, QuantizedLinear, quantize
from lopa.kernels.scaled import quantize_rows
from lopa.tasks import generate


@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_is_close_to_the_one_it_replaces(bias: bool) -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(300, 70, bias=bias).requires_grad_(False)
    x = torch.randn(9, 300)
    plain = F.linear(x, linear.weight, linear.bias)
    ours = QuantizedLinear(linear, torch.int8)
    assert (ours(x) - plain).norm() / plain.norm() < 0.02
    assert torch.equal(ours(x), ours(quantize_rows(x, torch.int8)))
    assert ours.weight.dtype == torch.int8


def test_int8_values_are_the_nearest() -> None:
    x = torch.tensor([[127.0, 63.5, -1.4, 0.6], [0.0, 0.0, 0.0, 0.0]])
    found = quantize_rows(x, torch.int8)
    assert found.values.tolist() == [[127, 64, -1, 1], [0, 0, 0, 0]]
    assert found.scale[0, 0] == 1.0


def test_only_the_linear_layers_change() -> None:
    llm = LLM("dummy:dream-tiny", device="cpu", dtype="float32")
    before = {name: p.dtype for name, p in llm.model.named_parameters()}
    quantize(llm.model, "int8")
    after = {name: p.dtype for name, p in llm.model.named_parameters()}
    changed = {name for name, dtype in after.items() if before.get(name, dtype) != dtype}
    assert changed == {
        f"layers.{index}.{part}.{name}.weight"
        for index in range(llm.config.layers)
        for part, name in PARTS
    }


def test_int8_answers_a_word_problem() -> None:
    problem = generate("words", seed=3, split="eval")
    llm = LLM("tiny", device="cpu", dtype="float32", quantize="int8")
    assert llm.quantize == "int8"
    config = llm.decode_config(decoder="d2f", max_new_tokens=128)
    assert score(problem, llm.generate(problem.prompt, config).text)


def test_refused_with_the_alternatives() -> None:
    with pytest.raises(DeviceError, match=r"fp8 needs a GPU.*on cpu choose int8"):
        LLM("dummy:dream-tiny", device="cpu", quantize="fp8")
    with pytest.raises(DeviceError, match=r"no quantization 'int4'.*choose int8"):
        LLM("dummy:dream-tiny", device="cpu", quantize="int4")
