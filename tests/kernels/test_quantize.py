"""Quantized layers: close to what they replace, and refused where they cannot run."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from lopa import LLM
from lopa.errors import DeviceError
from lopa.evaluation.scoring import score
from lopa.kernels.quantize import QuantizedLinear, quantize
from lopa.kernels.scaled import quantize_rows
from lopa.models import checkpoint, llada2, sdar_moe
from lopa.models.family import Family
from lopa.models.transformer import Layer
from lopa.runner.device import model_bytes
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
        f"layers.{index}.{name}.weight"
        for index in range(llm.config.layers)
        for name in ("attention.qkv", "attention.out", "feed_forward.gate_up", "feed_forward.down")
    }


@pytest.mark.parametrize("family", [llada2.FAMILY, sdar_moe.FAMILY], ids=lambda f: f.name)
def test_a_mixture_is_quantized_as_it_is_read(tmp_path: Path, family: Family) -> None:
    """The same weights as of a model that is quantized afterwards; routers stay in fp32."""
    checkpoint.write_tiny(family, tmp_path)
    exact = LLM(tmp_path, device="cpu")
    ours = LLM(tmp_path, device="cpu", quantize="int8")
    ids = [3, 1, 4, 1, 5, 9, 2, 6]
    plain, found = exact.forward(ids), ours.forward(ids)
    assert 0 < (found - plain).norm() < 0.2 * plain.norm()  # a router may choose otherwise
    quantize(exact.model, "int8")
    after, read = (dict(llm.model.named_parameters()) for llm in (exact, ours))
    assert after.keys() == read.keys()
    for name, parameter in after.items():
        assert torch.equal(read[name], parameter)
        is_weight = name.endswith(("gate_up", "down", "gate_up.weight", "down.weight"))
        assert (parameter.dtype == torch.int8) == (
            is_weight or "attention.out.w" in name or ("attention.qkv.w" in name)
        )


def test_layers_are_finished_one_by_one() -> None:
    """Before the next one takes memory."""
    config = checkpoint.model_config("dummy:dream-tiny")
    alive: list[int] = []
    made: list[weakref.ref[Layer]] = []
    original = Layer.__init__

    def recorded(self: Layer, *given: object) -> None:
        alive.append(sum(layer() is not None for layer in made))
        original(self, *given)  # type: ignore[arg-type]
        made.append(weakref.ref(self))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Layer, "__init__", recorded)
        finished: list[Layer] = []
        checkpoint.dummy(
            config,
            device=torch.device("cpu"),
            dtype=torch.float32,
            seed=0,
            finish=lambda layer: finished.append(layer),
        )
    assert [layer() for layer in made] == finished
    assert alive == list(range(config.layers))


def test_flash_fits_a_gpu_of_139_gib_in_fp8_alone() -> None:
    config = checkpoint.model_config("dummy:llada2-flash")
    gib = [
        model_bytes(config, torch.bfloat16, is_quantized=quantized) / 2**30
        for quantized in (True, False)
    ]
    assert gib[0] < 110
    assert gib[1] > 139


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
