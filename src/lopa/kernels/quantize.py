"""Quantized layers: weights with one scale per output column, activations per token.

fp8 (e4m3) needs a GPU of compute capability 8.9 or newer; int8 W8A8 runs anywhere. The embedding,
the head, the norms and routers keep their precision.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lopa.errors import DeviceError
from lopa.kernels.scaled import BLOCK, Scaled, quantize_blocks, quantize_rows
from lopa.models.feed_forward import FeedForward
from lopa.models.mixture import Experts, Mixture
from lopa.models.transformer import Layer, Transformer

Quantize = Literal["fp8", "int8"]
KINDS: dict[Quantize, torch.dtype] = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}


class QuantizedLinear(nn.Module):
    """x · weightᵀ · scale + bias, for a plain activation or a quantized one."""

    def __init__(self, linear: nn.Linear, kind: torch.dtype) -> None:
        super().__init__()
        self.kind = kind
        found = quantize_rows(linear.weight.data, kind)
        self.weight = nn.Parameter(found.values, requires_grad=False)  # [N, K]
        self.scale = nn.Parameter(found.scale, requires_grad=False)  # [N, 1]
        self.bias = linear.bias
        self.dtype = linear.weight.dtype

    def forward(self, x: Tensor | Scaled) -> Tensor:
        if isinstance(x, Tensor):
            x = quantize_rows(x, self.kind)
        on_device = x.values.device.type == "cuda"
        if on_device and self.kind is torch.float8_e4m3fn and _fills_device(x, self.weight):
            return torch._scaled_mm(
                x.values,
                self.weight.t(),
                scale_a=x.scale,
                scale_b=self.scale.t(),
                bias=self.bias,
                out_dtype=self.dtype,
                use_fast_accum=True,
            )
        if on_device:
            from lopa.kernels.triton.matmul import scaled_matmul

            return scaled_matmul(x.values, x.scale, self.weight, self.scale, self.bias, self.dtype)
        # Whole numbers: exact in fp32 as long as the sums stay below 2²⁴.
        out = x.values.float() @ self.weight.float().t() * x.scale * self.scale.t()
        out = out.to(self.dtype)
        return out if self.bias is None else out + self.bias


def _fills_device(x: Scaled, weight: Tensor) -> bool:
    """torch's fp8 product has tiles of 128 × 128 and does not split the inner axis."""
    rows, columns = len(x.values), len(weight)
    return rows > 64 and -(-rows // 128) * -(-columns // 128) > 64


class QuantizedExperts(Experts):
    """Experts with a scale per expert and output column, as a linear layer has them.

    The activation between the two products has a scale per token and BLOCK columns, not one per
    token: a kernel that has some columns of a token does not know the others. Experts are quantized
    one by one, so that only one of them is there in fp32.
    """

    def __init__(self, experts: Experts, kind: torch.dtype) -> None:
        nn.Module.__init__(self)
        self.count, self.kind = experts.count, kind
        self.dtype = experts.gate_up.dtype
        found = [_quantize_stack(stack, kind) for stack in experts.stacks]
        self.gate_up, self.down = (nn.Parameter(one.values, requires_grad=False) for one in found)
        self.gate_up_scale, self.down_scale = (
            nn.Parameter(one.scale, requires_grad=False) for one in found
        )

    @property
    def stacks(self) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return self.gate_up, self.down

    @property
    def scales(self) -> tuple[Tensor, Tensor]:
        """[experts, 2 · inner, 1] and [experts, hidden, 1]"""
        return self.gate_up_scale, self.down_scale

    def run(self, expert: int, x: Tensor) -> Tensor:
        given = quantize_rows(x, self.kind)
        both = given.values.float() @ self.gate_up[expert].float().t()
        both = both * given.scale * self.gate_up_scale[expert].t()
        gate, up = both.chunk(2, dim=-1)
        active = quantize_blocks(F.silu(gate) * up, self.kind)
        values, weight = active.values.float(), self.down[expert].float()
        out = torch.zeros(len(x), len(weight), device=x.device)
        parts = zip(*(torch.split(one, BLOCK, dim=1) for one in (values, weight)), strict=True)
        for index, (part, columns) in enumerate(parts):
            out += part @ columns.t() * active.scale[:, index : index + 1]
        return (out * self.down_scale[expert].t()).to(self.dtype)


class SharedExpert(nn.Module):
    """The last of quantized experts, which every token goes to."""

    def __init__(self, experts: QuantizedExperts) -> None:
        super().__init__()
        self._experts = [experts]  # in a list: its parameters are not this module's own

    def forward(self, x: Tensor) -> Tensor:
        (experts,) = self._experts
        return experts.run(experts.count, x)


def _quantize_stack(stack: Tensor, kind: torch.dtype) -> Scaled:
    """[experts, rows, columns], with a scale per expert and row."""
    values = torch.empty_like(stack, dtype=kind)
    scale = torch.empty(*stack.shape[:2], 1, dtype=torch.float32, device=stack.device)
    for index, weight in enumerate(stack):
        values[index], scale[index] = quantize_rows(weight, kind)
    return Scaled(values, scale)


def linears(layer: Layer) -> Iterator[tuple[nn.Module, str]]:
    """The linear layers of a layer: the module that has it, and its name there."""
    yield layer.attention, "qkv"
    yield layer.attention, "out"
    feed_forward = layer.feed_forward
    if isinstance(feed_forward, Mixture):
        feed_forward = feed_forward.shared  # type: ignore[assignment]
    if isinstance(feed_forward, FeedForward):
        yield feed_forward, "gate_up"
        yield feed_forward, "down"


def quantize_layer(layer: Layer, kind: Quantize) -> None:
    """Replace its linear layers and experts, one at a time."""
    mixture = layer.feed_forward
    if isinstance(mixture, Mixture):
        experts = QuantizedExperts(mixture.experts, KINDS[kind])
        if len(experts.gate_up) > experts.count:
            mixture.shared = SharedExpert(experts)
        mixture.experts = experts
    for owner, name in list(linears(layer)):
        setattr(owner, name, QuantizedLinear(getattr(owner, name), KINDS[kind]))


def quantize(model: Transformer, kind: Quantize) -> None:
    """Of a loaded model; a loader quantizes each layer as soon as it is read."""
    for layer in model.layers:
        quantize_layer(layer, kind)  # type: ignore[arg-type]


def check_quantize(name: str, device: torch.device) -> Quantize:
    """The name if the device supports it; else an error with the alternatives."""
    able = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
    choices: list[Quantize] = ["fp8", "int8"] if able else ["int8"]
    for choice in choices:
        if name == choice:
            return choice
    reason = ""
    if name == "fp8":
        reason = "fp8 needs a GPU of compute capability 8.9 or newer: "
    elif name not in KINDS:
        reason = f"there is no quantization {name!r}: "
    raise DeviceError(f"{reason}on {device} choose {' or '.join(choices)}, or leave it out")
