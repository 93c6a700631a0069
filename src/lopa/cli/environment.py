"""What a measurement was made with: model, device, dtype, versions."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Any

from lopa.version import VERSION

if TYPE_CHECKING:
    from lopa.engine.base_llm import BaseLLM


def environment(llm: BaseLLM) -> dict[str, Any]:
    import torch

    cuda = llm.device.type == "cuda"
    return {
        "model": llm.name,
        "device": torch.cuda.get_device_name(llm.device) if cuda else platform.machine(),
        "dtype": str(llm.dtype).removeprefix("torch."),
        "quantize": llm.quantize,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "lopa": VERSION,
    }


def environment_line(llm: BaseLLM) -> str:
    return ", ".join(f"{name} {value}" for name, value in environment(llm).items())
