"""Devices and precisions by name, refused in one line where they do not exist."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

import torch

from lopa.errors import DeviceError

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


def available_devices() -> list[str]:
    found = ["cpu"]
    found += [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        found.append("mps")
    found += [f"npu:{i}" for i in range(_npus())]
    return found


def _npus() -> int:
    """Ascend devices, where torch's extension for them is installed. Not verified on hardware."""
    if find_spec("torch_npu") is None:
        return 0
    import_module("torch_npu")
    return int(torch.npu.device_count())  # type: ignore[attr-defined]


def choose_device(name: str) -> torch.device:
    """`auto` is the first accelerator, else the CPU."""
    found = available_devices()
    if name == "auto":
        return torch.device(found[1] if len(found) > 1 else "cpu")
    wanted = {"cuda": "cuda:0", "npu": "npu:0", "cpu:0": "cpu"}.get(name, name)
    if wanted not in found:
        raise DeviceError(f"no device {name!r} here: choose from auto, {', '.join(found)}")
    return torch.device(wanted)


def choose_dtype(name: str, checkpoint: str) -> torch.dtype:
    """`auto` is what the checkpoint's config.json says."""
    wanted = checkpoint if name == "auto" else name
    if wanted not in DTYPES:
        raise DeviceError(f"no dtype {wanted!r}: choose from auto, {', '.join(DTYPES)}")
    return DTYPES[wanted]
