"""Devices and precisions by name, refused in one line where they do not exist."""

from __future__ import annotations

import platform
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch

from lopa.errors import DeviceError
from lopa.models.config import ModelConfig
from lopa.runner.kv_cache import PAGE, token_bytes

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
_MOST_SEQUENCES = 64  # of full length, in the default cache when memory is plenty


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


def device_name(device: torch.device) -> str:
    """What the hardware is called, as far as can be told."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next(line for line in lines if line.startswith("model name"))
        return f"{device.type}: {name.partition(':')[2].strip()}"
    return f"{device.type}: {platform.machine()}"


def choose_dtype(name: str, checkpoint: str) -> torch.dtype:
    """`auto` is what the checkpoint's config.json says."""
    wanted = checkpoint if name == "auto" else name
    if wanted not in DTYPES:
        raise DeviceError(f"no dtype {wanted!r}: choose from auto, {', '.join(DTYPES)}")
    return DTYPES[wanted]


def free_bytes(device: torch.device) -> int | None:
    """Free memory of the device, where the system reports it."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:  # available without swapping: unlike free memory, it counts cached files
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        available = next(line for line in lines if line.startswith("MemAvailable:"))
        return int(available.split()[1]) * 1024
    except (OSError, StopIteration, ValueError):
        return None


def check_fits(
    config: ModelConfig, device: torch.device, dtype: torch.dtype, quantize: str | None = None
) -> None:
    """Refuse a model that does not fit the device, before anything is loaded."""
    free = free_bytes(device)
    wanted = model_bytes(config, dtype, is_quantized=quantize is not None)
    if free is not None and wanted > free:
        name = quantize or str(dtype).removeprefix("torch.")
        raise DeviceError(
            f"the model takes {wanted / 2**30:.1f} GiB as {name} and "
            f"{device} has {free / 2**30:.1f} GiB free, {(wanted - free) / 2**30:.1f} GiB too "
            "little: choose a smaller dtype or another device"
        )


def model_bytes(config: ModelConfig, dtype: torch.dtype, *, is_quantized: bool) -> int:
    """What loading it takes: a layer is read in `dtype` and quantized before the next is read."""
    if not is_quantized:
        return config.parameters * dtype.itemsize
    layers = [config.layer_parameters(index) for index in range(config.layers)]
    return sum(layers) + (config.parameters - sum(layers) + max(layers)) * dtype.itemsize


def default_cache_tokens(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> int:
    """On a GPU most of what the weights leave free; elsewhere a part, committed as it is used."""
    free = free_bytes(device)
    share = 0.8 if device.type == "cuda" else 0.25
    wanted = _MOST_SEQUENCES * config.max_positions
    if free is None:
        return wanted
    return max(PAGE, min(wanted, int(share * free) // token_bytes(config, dtype)))


def memory_beside_cache(
    cache_tokens: int | None, config: ModelConfig, device: torch.device, dtype: torch.dtype
) -> int:
    """Bytes that a cache of so many tokens leaves free; None: its size follows what is free."""
    return (free_bytes(device) or 0) - (cache_tokens or 0) * token_bytes(config, dtype)
