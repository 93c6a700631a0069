"""Devices and precisions by name, refused in one line where they do not exist."""

from __future__ import annotations

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
    return found


def choose_device(name: str) -> torch.device:
    """`auto` is the first accelerator, else the CPU."""
    found = available_devices()
    if name == "auto":
        return torch.device(found[1] if len(found) > 1 else "cpu")
    wanted = "cuda:0" if name == "cuda" else "cpu" if name == "cpu:0" else name
    if wanted not in found:
        raise DeviceError(f"no device {name!r} here: choose from auto, {', '.join(found)}")
    return torch.device(wanted)


def choose_dtype(name: str, checkpoint: str) -> torch.dtype:
    """`auto` is what the checkpoint's config.json says."""
    wanted = checkpoint if name == "auto" else name
    if wanted not in DTYPES:
        raise DeviceError(f"no dtype {wanted!r}: choose from auto, {', '.join(DTYPES)}")
    return DTYPES[wanted]
