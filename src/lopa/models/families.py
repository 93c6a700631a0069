"""The families there are, and which one a config.json belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lopa.config import DecodeConfig
from lopa.errors import CheckpointError
from lopa.models import dream, fast_dllm_v2, llada, llada2, sdar, sdar_moe
from lopa.models.config import ModelConfig
from lopa.models.family import Family
from lopa.option_checks import check_names

FAMILIES: tuple[Family, ...] = tuple(
    module.FAMILY for module in (dream, llada, llada2, sdar, sdar_moe, fast_dllm_v2)
)


def family_of(raw: Mapping[str, Any]) -> Family:
    architectures = raw.get("architectures") or []
    if isinstance(architectures, str):
        architectures = [architectures]
    if not isinstance(architectures, list):
        raise CheckpointError(f"config.json: architectures is {architectures!r}, not a list")
    for family in FAMILIES:
        if any(a in family.architectures for a in architectures):
            return family
    if not architectures:
        for family in FAMILIES:
            if raw.get("model_type") in family.model_types:
                return family
    found = ", ".join(map(str, architectures)) or raw.get("model_type") or "none given"
    known = ", ".join(a for f in FAMILIES for a in f.architectures)
    raise CheckpointError(f"unknown architecture ({found}): lopa runs {known}")


def family_named(name: str) -> Family:
    return next(family for family in FAMILIES if family.name == name)


def dummy_shapes() -> dict[str, ModelConfig]:
    return {name: shape for family in FAMILIES for name, shape in family.shapes.items()}


def settings_for(config: ModelConfig, preset: str | None, given: Mapping[str, Any]) -> DecodeConfig:
    """Decoding settings for a model: what is given, else a preset, else what suits its family."""
    check_names(given)
    family = family_named(config.family)
    own = family.defaults(config, given.get("decoder"))
    if preset is not None:
        settings = DecodeConfig.preset(preset, **{**own, **given})
    else:
        settings = DecodeConfig(**{**own, **given})
    family.check(config, settings)
    return settings
