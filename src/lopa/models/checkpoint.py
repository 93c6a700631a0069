"""Checkpoints: from a folder of safetensors (and perhaps a LoRA) to a transformer on a device.

Tensors are memory-mapped and copied one by one into the transformer's own parameters, so loading
needs little more memory than the model. A LoRA is added to each tensor as it is read, before it
is merged with its neighbours or cast.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lopa.errors import CheckpointError
from lopa.models.config import ModelConfig
from lopa.models.families import dummy_shapes, family_named, family_of
from lopa.models.family import Family, Target
from lopa.models.files import file_size, read_json, resolve, safetensors_header
from lopa.models.lora import Lora
from lopa.models.transformer import Transformer

DUMMY = "dummy:"  # in front of a shape's name: random weights
Progress = Callable[[int, int], None]  # tensors done, tensors in all


def model_config(name: str | Path) -> ModelConfig:
    """The config of a model by its name, without its weights."""
    if not str(name).startswith(DUMMY):
        return read_config(resolve(name))
    shapes = dummy_shapes()
    shape = str(name).removeprefix(DUMMY)
    if shape not in shapes:
        raise CheckpointError(f"no dummy shape {shape!r}: choose from {', '.join(shapes)}")
    return shapes[shape]


def read_config(folder: Path) -> ModelConfig:
    raw = read_json(folder / "config.json")
    return family_of(raw).read_config(raw)


def load(
    folder: Path,
    config: ModelConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    adapter: Path | None = None,
    progress: Progress | None = None,
) -> Transformer:
    """The folder's weights, with the adapter merged, as a transformer in `dtype` on `device`."""
    family = family_named(config.family)
    files = _files(folder)
    targets = family.weight_targets(config)
    tied = replace(config, tied_head=True)
    if not config.tied_head and files.keys().isdisjoint(
        targets.keys() - family.weight_targets(tied).keys()
    ):
        config, targets = tied, family.weight_targets(tied)  # no head in the files: it is shared
    lora = Lora.read(adapter, targets) if adapter else None
    _check_names(folder, files, targets, family, config)
    for path in {files[key] for key in targets}:  # before memory is asked for
        _check_shapes(path, [key for key in targets if files[key] == path], targets)
    model = empty(config, device, dtype)
    parameters = dict(model.named_parameters())
    done = 0
    for path in sorted({files[key] for key in targets}):
        keys = [key for key in targets if files[key] == path]
        for key, tensor in _read(path, keys):
            if lora is not None:
                tensor = lora.apply(key, tensor, device)
            _place(parameters, targets[key], tensor)
            done += 1
            if progress:
                progress(done, len(targets))
    return model.eval()


def empty(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Transformer:
    """A transformer with unwritten weights."""
    return Transformer(config, device, dtype).requires_grad_(False)


def dummy(
    config: ModelConfig, *, device: torch.device, dtype: torch.dtype, seed: int
) -> Transformer:
    """Random weights of a shape: for trying and timing, not for reading."""
    model = empty(config, device, dtype)
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.fill_(1.0)
        elif parameter.dim() == 1:
            parameter.zero_()
        else:
            # Unit-variance activations; a head strong enough that confidences spread out.
            scale = 4.0 if name == "head.weight" else 1.0
            parameter.normal_(0.0, scale * parameter.shape[1] ** -0.5, generator=generator)
    return model.eval()


def write_tiny(family: Family, folder: Path) -> None:
    """A checkpoint of random weights, a few kilobytes, in the family's own layout."""
    config = family.read_config(family.tiny)
    model = dummy(config, device=torch.device("cpu"), dtype=torch.float32, seed=0)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {key: tensor.contiguous() for key, tensor in tensors(model).items()},
        folder / "model.safetensors",
    )
    (folder / "config.json").write_text(json.dumps(dict(family.tiny), indent=2) + "\n")


def tensors(model: Transformer) -> dict[str, Tensor]:
    """The model's weights under its family's own names, as views: what a checkpoint holds."""
    parameters = dict(model.named_parameters())
    targets = family_named(model.config.family).weight_targets(model.config)
    return {
        key: parameters[t.parameter].data[t.start : t.start + t.shape[0]]
        for key, t in targets.items()
    }


def _place(parameters: dict[str, torch.nn.Parameter], target: Target, tensor: Tensor) -> None:
    rows = parameters[target.parameter].data[target.start : target.start + target.shape[0]]
    rows.copy_(tensor)


def _files(folder: Path) -> dict[str, Path]:
    """Which file holds each tensor, by the index or the one file there is."""
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise CheckpointError(f"{index} has no weight_map: fetch it again")
        files = {key: folder / str(name) for key, name in weight_map.items()}
        for name in sorted(set(map(str, weight_map.values()))):
            if Path(name).is_absolute() or ".." in Path(name).parts:
                raise CheckpointError(f"{index} names {name}, outside the folder: fetch it again")
            file_size(folder / name)  # it is there
    elif single.exists():
        files = dict.fromkeys(safetensors_header(single), single)
    else:
        others = sorted(p.name for p in folder.glob("*.bin")) + sorted(
            p.name for p in folder.glob("*.pt*")
        )
        hint = f" ({others[0]} is not read: convert it to safetensors)" if others else ""
        raise CheckpointError(f"{folder} holds no model.safetensors{hint}")
    return files


def _check_names(
    folder: Path,
    files: dict[str, Path],
    targets: dict[str, Target],
    family: Family,
    config: ModelConfig,
) -> None:
    """Every tensor that is needed is there, and none that is not known."""
    missing = [key for key in targets if key not in files]
    if missing:
        raise CheckpointError(
            f"{folder}: tensor {missing[0]} is missing"
            + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
            + ": the checkpoint does not match its config.json"
        )
    untied = family.weight_targets(replace(config, tied_head=False))  # a head that is not used
    unknown = [
        key
        for key in files
        if key not in targets and key not in untied and not key.endswith(family.ignored)
    ]
    if unknown:
        raise CheckpointError(
            f"{folder}: tensor {unknown[0]} is not part of a {family.name} model with this "
            "config.json: running without it would give wrong results"
        )


def _check_shapes(path: Path, keys: list[str], targets: dict[str, Target]) -> None:
    header = safetensors_header(path)
    for key in keys:
        if key not in header:
            raise CheckpointError(f"{path}: tensor {key} is missing although the index names it")
        shape = tuple(header[key]["shape"])
        if shape != targets[key].shape:
            raise CheckpointError(
                f"{path}: tensor {key} has shape {list(shape)} where config.json asks for "
                f"{list(targets[key].shape)}"
            )


def _read(path: Path, keys: list[str]) -> Iterator[tuple[str, Tensor]]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            for key in keys:
                yield key, file.get_tensor(key)
    except SafetensorError as error:
        raise CheckpointError(f"{path} cannot be read ({error}): fetch it again") from None
