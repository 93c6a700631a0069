"""What rounds cost, kept on disk: it is measured once for a model on a device.

A file holds the cost and what it was measured with. One that cannot be read, or was measured with
other weights or other versions, counts as none. A folder that cannot be written is no error: the
next run measures again.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch

from lopa.cache_folder import cache_folder
from lopa.decoding.round_cost import RoundCost
from lopa.engine.loader import LoadOptions
from lopa.errors import LopaError
from lopa.models.checkpoint import DUMMY
from lopa.models.files import resolve
from lopa.runner.device import device_name
from lopa.version import VERSION

# What a file is found by; one that differs in anything else is measured anew.
NAMES = (
    *("model", "adapter", "device", "dtype", "quantize", "backend", "threads", "cache_tokens"),
    *("branch_parallel", "tensor_parallel"),
)

# RuntimeError: there is no home folder
_UNREADABLE = (
    *(OSError, RuntimeError, ValueError, LookupError, TypeError, RecursionError, LopaError),
)
About = Mapping[str, str]  # what a cost was measured with


def measured_with(
    model: str,
    options: LoadOptions,
    device: torch.device,
    dtype: torch.dtype,
    quantize: str | None,
) -> dict[str, str]:
    is_folder = Path(model).is_dir()
    adapter = options.adapter
    found = {
        "model": Path(model).resolve() if is_folder else model,
        "weights": weights_identity(model),
        "adapter": None if adapter is None else f"{adapter} {weights_identity(str(adapter))}",
        "device": device_name(device),
        "dtype": dtype,
        "quantize": quantize,
        "backend": options.backend,
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
        "cache_tokens": options.cache_tokens,
        "torch": torch.__version__,
        "lopa": VERSION,
    }
    return {name: str(value) for name, value in found.items() if value is not None}


def path_of(about: About) -> Path:
    name = re.sub(r"[^\w.-]+", "-", Path(about["model"]).name)[:40]
    known = json.dumps([about.get(part) for part in NAMES])
    digest = hashlib.sha256(known.encode()).hexdigest()[:16]
    return cache_folder("round_cost") / f"{name}-{digest}.json"


def load(about: About) -> RoundCost | None:
    try:
        path = path_of(about).expanduser()
        raw = json.loads(path.read_text(encoding="utf-8"))
        if raw["about"] != dict(about):
            return None
        return RoundCost.of(raw)
    except _UNREADABLE:
        return None


def kept_for(device: torch.device) -> list[tuple[About, RoundCost]]:
    """All that this version has kept for such a device, the latest first."""
    found: list[tuple[float, About, RoundCost]] = []
    for path in _files():
        with suppress(*_UNREADABLE):
            raw = json.loads(path.read_text(encoding="utf-8"))
            about, name = raw["about"], device_name(device)
            if (about["device"], about["lopa"], about["torch"]) == (
                name,
                VERSION,
                torch.__version__,
            ):
                found.append((path.stat().st_mtime, about, RoundCost.of(raw)))
    return [(about, cost) for _, about, cost in sorted(found, key=lambda one: -one[0])]


def _files() -> list[Path]:
    try:
        return list(cache_folder("round_cost").expanduser().glob("*.json"))
    except (OSError, RuntimeError):
        return []


def save(cost: RoundCost, about: About) -> None:
    with suppress(OSError, RuntimeError, LopaError):
        cost.write(path_of(about).expanduser(), about=dict(about))


def weights_identity(model: str) -> str | None:
    """Of the files of a model or an adapter: names, sizes and times. None: they are gone."""
    if model.startswith(DUMMY):
        return model
    try:
        files = sorted(f for f in resolve(model).iterdir() if f.suffix in (".safetensors", ".json"))
        stats = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    except (OSError, LopaError):
        return None
    return hashlib.sha256(repr(stats).encode()).hexdigest()[:16]
