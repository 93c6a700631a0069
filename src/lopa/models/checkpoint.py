"""Checkpoints: from a folder of safetensors (and perhaps a LoRA) to a transformer on a device.

Layers are made and written one after another, and each may be changed for good (quantized) before
the next is made, so loading needs little more memory than the result. Tensors are read one by one
straight into a layer's own parameters, and of a part of a model only what it holds. A LoRA is added
to each tensor as it is read, before it is merged with its neighbours or cast.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from lopa.errors import CheckpointError
from lopa.models.config import ModelConfig
from lopa.models.families import dummy_shapes, family_named, family_of
from lopa.models.family import Family, Target
from lopa.models.feed_forward import Where
from lopa.models.files import file_size, read_json, resolve, safetensors_header
from lopa.models.lora import Lora
from lopa.models.part import WHOLE, Part
from lopa.models.tensor_file import TensorFile
from lopa.models.transformer import Layer, Transformer
from lopa.models.unreadable import no_config, no_weights

DUMMY = "dummy:"  # in front of a shape's name: random weights
Progress = Callable[[int, int], None]  # tensors done, tensors in all
Finish = Callable[[Layer], None]  # what is done to a layer once its weights are written


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
    if not (folder / "config.json").exists():
        raise no_config(folder)
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
    part: Part = WHOLE,
    finish: Finish | None = None,
) -> Transformer:
    """The folder's weights, with the adapter merged, as a transformer in `dtype` on `device`.

    Of a part of it the config is still that of the whole model.
    """
    config, targets, keys = check(folder, config)  # before memory is asked for
    lora = Lora.read(adapter, targets) if adapter else None
    files = {key: path for path, inside in keys.items() for key in inside}
    places: dict[str, list[str]] = {}  # by the module that they are for
    for key, target in targets.items():
        places.setdefault(_module_of(target.parameter), []).append(key)
    done = 0
    with ExitStack() as stack:
        opened = {path: stack.enter_context(TensorFile(path)) for path in sorted(keys)}

        def write(name: str, parameters: dict[str, nn.Parameter]) -> None:
            nonlocal done
            own = places.get(name, [])
            for key in sorted(own, key=lambda key: (files[key], opened[files[key]].place(key))):
                _read(opened[files[key]], key, targets[key], parameters, config, part, lora)
                done += 1
                if progress:
                    progress(done, len(targets))

        return _assemble(config, device, dtype, part, write, finish)


def _assemble(
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    part: Part,
    write: Callable[[str, dict[str, nn.Parameter]], None],
    finish: Finish | None,
) -> Transformer:
    """A transformer whose layers are made one after another.

    write: given a module's name and its parameters by their names in the whole.
    """
    own = part.config(config)
    model = Transformer(own, device, dtype, with_layers=False).requires_grad_(False)
    model.config = config

    def written(name: str, module: nn.Module) -> None:
        inside = module.named_parameters()
        write(name, {f"{name}.{parameter}": value for parameter, value in inside})

    for name, module in model.named_children():
        if module is not model.layers:
            written(name, module)
            continue
        for index in range(own.layers):
            layer = Layer(own, index, Where(device, dtype)).requires_grad_(False)
            written(f"{name}.{index}", layer)
            if finish is not None:
                finish(layer)
            model.layers.append(layer)
    return model.eval()


def _module_of(parameter: str) -> str:
    """Of those that are made one after another."""
    parts = parameter.split(".")
    return ".".join(parts[:2]) if parts[0] == "layers" else parts[0]


def check(
    folder: Path, config: ModelConfig
) -> tuple[ModelConfig, dict[str, Target], dict[Path, list[str]]]:
    """Whether the folder's tensors are those of the config, by their names and shapes alone.

    Returns the config that they have, where each belongs, and their names by file.
    """
    family = family_named(config.family)
    files = _files(folder)
    config, targets = _fit(files, family, config)
    _check_names(folder, files, targets, family, config)
    keys: dict[Path, list[str]] = {}
    for key in targets:
        keys.setdefault(files[key], []).append(key)
    for path, inside in keys.items():
        _check_shapes(path, inside, targets)
    return config, targets, keys


def _read(
    file: TensorFile,
    key: str,
    target: Target,
    parameters: dict[str, torch.nn.Parameter],
    config: ModelConfig,
    part: Part,
    lora: Lora | None,
) -> None:
    """Write a tensor, or what the part holds of it, to where it belongs."""
    parameter = parameters[target.parameter].data
    for source, place in part.pieces(target, parameter.dim(), config):
        into = parameter[place]
        delta = None if lora is None else lora.delta(key, source, into.device)
        if delta is None:
            file.read(key, source, into)
        else:
            weight = torch.empty_like(into, dtype=torch.float32)
            file.read(key, source, weight)
            into.copy_(weight + delta)


def _fit(
    files: dict[str, Path], family: Family, config: ModelConfig
) -> tuple[ModelConfig, dict[str, Target]]:
    """The config and the layout that the files have: a head may be shared without a word, say.

    Where none fits, what config.json says, for the error to be about that.
    """
    for taken in product((False, True), repeat=len(family.told_by_tensors)):
        told = (fields for fields, use in zip(family.told_by_tensors, taken, strict=True) if use)
        changed = replace(config, **{name: value for f in told for name, value in f.items()})
        for layout in family.layouts:
            targets = layout(changed)
            if files.keys() >= targets.keys() and not _unknown(files, targets, family, changed):
                return changed, targets
    return config, family.weight_targets(config)


def dummy(
    config: ModelConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
    part: Part = WHOLE,
    finish: Finish | None = None,
) -> Transformer:
    """Random weights of a shape: for trying and timing, not for reading."""
    # All parts are of one model, which is made on the host, a parameter at a time.
    is_whole = part.count == 1
    generator = torch.Generator(device if is_whole else "cpu").manual_seed(seed)
    whole = {}
    if not is_whole:
        whole = dict(Transformer(config, torch.device("meta"), dtype).named_parameters())

    def write(_: str, parameters: dict[str, nn.Parameter]) -> None:
        for name, parameter in parameters.items():
            if is_whole:
                _initialise(name, parameter.data, generator)
                continue
            made = torch.empty_like(whole[name], device="cpu")
            _initialise(name, made, generator)
            for place, values in part.take(made, name, config):
                parameter.data[place].copy_(values)

    return _assemble(config, device, dtype, part, write, finish)


def _initialise(name: str, parameter: Tensor, generator: torch.Generator) -> None:
    if name.endswith("norm.weight"):
        parameter.fill_(1.0)
    elif name.endswith("router.bias"):
        # Enough to change which experts are chosen.
        parameter.normal_(0.0, 0.05, generator=generator)
    elif parameter.dim() == 1:
        parameter.zero_()
    else:
        # Unit-variance activations; a head strong enough that confidences spread out.
        scale = 4.0 if name == "head.weight" else 1.0
        parameter.normal_(0.0, scale * parameter.shape[-1] ** -0.5, generator=generator)


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
    found = {}
    for key, target in family_named(model.config.family).weight_targets(model.config).items():
        parameter = parameters[target.parameter].data
        found[key] = parameter[target.place(parameter.dim())]
    return found


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
        raise no_weights(folder)
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
    if unknown := _unknown(files, targets, family, config):
        raise CheckpointError(
            f"{folder}: tensor {unknown[0]} is not part of a {family.name} model with this "
            "config.json: running without it would give wrong results"
        )


def _unknown(
    files: dict[str, Path], targets: dict[str, Target], family: Family, config: ModelConfig
) -> list[str]:
    """Tensors that have no place."""
    others = [key for key in files if key not in targets and not key.endswith(family.ignored)]
    if others:
        untied = family.weight_targets(replace(config, tied_head=False))  # a head that is not used
        others = [key for key in others if key not in untied]
    return others


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
