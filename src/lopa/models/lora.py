"""PEFT LoRA adapters: W += scale · B·A, tensor by tensor, before anything else is done to W."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lopa.errors import CheckpointError
from lopa.models.family import Target
from lopa.models.files import read_json, safetensors_header

_KEY = re.compile(r"^(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.default)?\.weight$")
# Fields that change what an adapter means, and the values under which it is a plain LoRA.
_PLAIN: dict[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "use_dora": (None, False),
    "fan_in_fan_out": (None, False),
    "bias": (None, "none"),
    "modules_to_save": (None, []),
    "alora_invocation_tokens": (None, []),
    "layer_replication": (None, []),
    "use_qalora": (None, False),
}
_WEIGHTS = "adapter_model.safetensors"


@dataclass(slots=True)
class Lora:
    pairs: dict[str, tuple[Tensor, Tensor]]  # checkpoint key → (A [r, in], B [out, r])
    scales: dict[str, float]

    def delta(self, key: str, box: tuple[slice, ...], device: torch.device) -> Tensor | None:
        """What to add to a box of a weight, in fp32; None: nothing."""
        if key not in self.pairs:
            return None
        a, b = (x.to(device, torch.float32) for x in self.pairs[key])
        return self.scales[key] * (b[box[0]] @ a[:, box[1]])

    @classmethod
    def read(cls, folder: Path, targets: dict[str, Target]) -> Lora:
        """Reads adapter_config.json and adapter_model.safetensors; every tensor must fit."""
        scales, keys = check(folder, targets)
        path = folder / _WEIGHTS
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                tensors = {key: file.get_tensor(key) for pair in keys.values() for key in pair}
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} cannot be read ({error}): fetch it again") from None
        pairs = {target: (tensors[a], tensors[b]) for target, (a, b) in keys.items()}
        return cls(pairs, scales)


def check(
    folder: Path, targets: dict[str, Target]
) -> tuple[dict[str, float], dict[str, tuple[str, str]]]:
    """Whether an adapter fits the model, by its config and its header alone.

    Returns the scale and the names of A and B by checkpoint key.
    """
    if not (folder / "adapter_config.json").exists():
        raise CheckpointError(
            f"{folder / 'adapter_config.json'} is missing: fetch it from where {_WEIGHTS} came "
            "from; a folder that holds a whole model is not an adapter"
        )
    config = read_json(folder / "adapter_config.json")
    for name, plain in _PLAIN.items():
        if name in config and config[name] not in plain:
            raise CheckpointError(
                f"{folder}: adapter with {name} = {config[name]!r} is not supported, "
                "only plain LoRA is: merge it into the model with PEFT first"
            )
    path = folder / _WEIGHTS
    if not path.exists():
        pickled = (folder / "adapter_model.bin").exists()
        raise CheckpointError(
            f"{path} is missing: "
            + (
                "adapter_model.bin is not read, load it with PEFT and save it again by "
                "save_pretrained(FOLDER)"
                if pickled
                else f"is {folder} a PEFT adapter folder?"
            )
        )
    header = safetensors_header(path)
    halves: dict[str, dict[str, str]] = {}
    for key in header:
        match = _KEY.match(key)
        target = targets.get(match[1] + ".weight") if match else None
        if match is None or target is None or len(target.shape) != 2:
            raise CheckpointError(
                f"{path}: {key} fits no layer of this model: the adapter was made for another one"
            )
        halves.setdefault(match[1], {})[match[2]] = key
    if not halves:
        raise CheckpointError(f"{path} holds no LoRA tensors")
    scales, keys = {}, {}
    for module, half in halves.items():
        if half.keys() != {"A", "B"}:
            raise CheckpointError(f"{path}: {module} has only one half of its LoRA pair")
        if not _is_target(config.get("target_modules"), module):
            raise CheckpointError(
                f"{path}: {module} is none of the target_modules of adapter_config.json: "
                "the two files are not of one adapter"
            )
        rank = _pattern(config, "rank_pattern", module, config.get("r"))
        alpha = _pattern(config, "alpha_pattern", module, config.get("lora_alpha"))
        if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float):
            raise CheckpointError(f"{path.parent}: adapter_config.json lacks r or lora_alpha")
        out, into = targets[module + ".weight"].shape
        a, b = header[half["A"]]["shape"], header[half["B"]]["shape"]
        if a != [rank, into] or b != [out, rank]:
            raise CheckpointError(
                f"{path}: {module} has A {a} and B {b} where [{rank}, {into}] and [{out}, {rank}] "
                "fit this model: the adapter was made for another one"
            )
        keys[module + ".weight"] = half["A"], half["B"]
        root = math.sqrt(rank) if config.get("use_rslora") else rank
        scales[module + ".weight"] = alpha / root
    return scales, keys


def _is_target(targets: Any, module: str) -> bool:
    """As PEFT has it: a list of name endings, or one regular expression; left out is anything."""
    if isinstance(targets, list):
        return any(module == str(t) or module.endswith(f".{t}") for t in targets)
    if not isinstance(targets, str) or targets == "all-linear":
        return True
    try:
        return re.fullmatch(targets, module) is not None
    except re.error as error:
        raise CheckpointError(
            f"adapter_config.json: target_modules cannot be read ({error})"
        ) from None


def _pattern(config: dict[str, Any], name: str, module: str, default: Any) -> Any:
    """PEFT's per-module exceptions: keys are regular expressions on the end of the name."""
    patterns = config.get(name) or {}
    try:
        found = [v for p, v in patterns.items() if re.match(rf"(.*\.)?({p})$", module)]
    except (AttributeError, re.error) as error:
        raise CheckpointError(f"adapter_config.json: {name} cannot be read ({error})") from None
    return found[0] if found else default
