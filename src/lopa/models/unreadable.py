"""What a folder holds in place of a checkpoint that can be read, and what to do about it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lopa.errors import CheckpointError

_SHARD = re.compile(r".+-\d+-of-(\d+)\.safetensors")
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")
_LFS = b"version https://git-lfs.github.com/spec/"


def no_config(folder: Path) -> CheckpointError:
    """Of a folder without a config.json."""
    if (folder / "adapter_config.json").exists() or (folder / "adapter_model.safetensors").exists():
        return CheckpointError(
            f"{folder} is an adapter: give it as the adapter, and the model that it was trained on "
            "as the model"
        )
    if found := _gguf(folder):
        return found
    return CheckpointError(f"{folder / 'config.json'} is missing: is {folder} a model folder?")


def no_weights(folder: Path) -> CheckpointError:
    """Of a folder without a model.safetensors and without an index of shards."""
    names = sorted(path.name for path in folder.iterdir())
    shards = [name for name in names if _SHARD.fullmatch(name)]
    pickled = [name for name in names if name.endswith(_PICKLED)]
    if shards:
        return CheckpointError(
            f"{folder} holds shards ({shards[0]} …) without model.safetensors.index.json: "
            "fetch it too, it says which tensor is in which"
        )
    if pickled:
        return CheckpointError(
            f"{folder} holds no model.safetensors, and {pickled[0]} is not read, since it could "
            "run code: load it with transformers and save it again by "
            "save_pretrained(FOLDER, safe_serialization=True)"
        )
    return _gguf(folder) or CheckpointError(
        f"{folder} holds no model.safetensors: is it fetched as a whole?"
    )


def _gguf(folder: Path) -> CheckpointError | None:
    found = sorted(folder.glob("*.gguf"))
    return is_gguf(found[0]) if found else None


def is_gguf(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path.name} is GGUF, the format of llama.cpp, which is not read: give the checkpoint in "
        "safetensors that it was made from, and --quantize fp8 or int8 if it must be small"
    )


def check_quantized(raw: Mapping[str, Any]) -> None:
    """Refuse weights that are stored quantized (GPTQ, AWQ, …)."""
    found = raw.get("quantization_config")
    if found is None:
        return
    method = found.get("quant_method") if isinstance(found, Mapping) else None
    raise CheckpointError(
        f"config.json: the weights are stored quantized ({method or 'quantization_config'}), which "
        "is not read: give the checkpoint that they were made from, and --quantize fp8 or int8"
    )


def check_pointer(path: Path, start: bytes) -> None:
    """Refuse a file that begins as a Git LFS pointer."""
    if start.startswith(_LFS):
        raise CheckpointError(
            f"{path} is a Git LFS pointer in place of the file: run git lfs pull in {path.parent}"
        )
