"""The settings of a training run: one frozen dataclass per section of the TOML file.

Defaults live here and nowhere else; a file or an override that names an unknown setting, or gives
one of the wrong type, is refused in one line.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from lopa.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Model:
    vocab_size: int = 2048  # at most: the tokenizer may find fewer merges
    hidden_size: int = 512
    layers: int = 10
    heads: int = 8
    kv_heads: int = 4
    intermediate_size: int = 1152
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    max_positions: int = 1024
    tied_head: bool = False


@dataclass(frozen=True, slots=True)
class Data:
    source: str = "lopa.tasks"  # module with generate(task, seed, split)
    scoring: str = "lopa.evaluation.scoring"  # module with score(problem, text)
    tasks: dict[str, float] = field(default_factory=lambda: {"words": 0.55, "functions": 0.45})
    length: int = 224  # of every training row; longer problems are dropped
    workers: int = 14
    chunk: int = 2048  # rows a worker hands over at once
    capacity: int = 1_000_000  # rows kept on the device; the oldest are overwritten
    renew: bool = True  # False: workers end when the ring is full
    ready: int = 16_384  # rows that must be there before the first step
    patience: float = 90.0  # seconds to wait for them
    vocabulary_problems: int = 8_000  # per task, to train the tokenizer on
    human_rows: int = 60_000  # at most, with --data: tokenising them delays the first step
    human_share: float = 0.2  # of a batch, when --data is given


@dataclass(frozen=True, slots=True)
class Noise:
    # Shares of the four kinds of attention; see noise.py.
    block: float = 0.42
    full: float = 0.30
    history: float = 0.14
    plain: float = 0.14
    small_blocks: float = 0.2  # share of rows cut into blocks of 16 instead of 32
    active: tuple[float, ...] = (0.25, 0.30, 0.25, 0.20)  # of 1, 2, 3, 4 active blocks
    fresh: float = 0.4  # share of rows whose last active block is still fully masked
    canvas: float = 0.5  # share of `plain` rows with a canvas of exactly `canvas_length`
    canvas_length: int = 128


@dataclass(frozen=True, slots=True)
class Optim:
    optimizer: str = "adamw"  # or muon: for the matrices inside the layers
    batch: int = 512
    lr: float = 2e-3
    muon_lr: float = 2e-3
    warmup: int = 300  # steps
    cooldown: float = 0.6  # the last share of the time budget, in which lr falls to zero
    betas: tuple[float, ...] = (0.9, 0.95)
    weight_decay: float = 0.05
    clip: float = 1.0
    ema: float = 0.999


@dataclass(frozen=True, slots=True)
class Run:
    seed: int = 0
    save_every: float = 120.0  # seconds
    evaluate_every: float = 150.0
    evaluate_rows: int = 256  # per task, for the masked-token loss
    evaluate_problems: int = 24  # decoded, per task and decoder
    evaluate_seconds: float = 2.5  # at most, per task and decoder
    evaluate_final: int = 100  # the same, after the last step
    final_seconds: float = 8.0
    new_tokens: int = 160


@dataclass(frozen=True, slots=True)
class Settings:
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    noise: Noise = field(default_factory=Noise)
    optim: Optim = field(default_factory=Optim)
    run: Run = field(default_factory=Run)


def load(path: Path | None, overrides: list[str] | None = None) -> Settings:
    """The settings of a TOML file with `section.name=value` overrides (values in TOML) on top."""
    settings = Settings()
    if path is not None:
        try:
            raw = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"{path}: {error}") from None
        settings = _merge(settings, raw, str(path))
    for override in overrides or []:
        name, equals, value = override.partition("=")
        section, dot, key = name.partition(".")
        if not (equals and dot):
            raise ConfigError(f"--set {override}: write section.name=value")
        try:
            parsed = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            parsed = value  # a bare word is text
        settings = _merge(settings, {section: {key: parsed}}, f"--set {override}")
    return settings


def _merge(settings: Settings, raw: dict[str, Any], source: str) -> Settings:
    changes = {}
    for section, values in raw.items():
        if section not in {f.name for f in fields(Settings)} or not isinstance(values, dict):
            raise ConfigError(f"{source}: there is no section {section!r}")
        current = getattr(settings, section)
        known = {f.name for f in fields(current)}
        for key, value in values.items():
            if key not in known:
                raise ConfigError(f"{source}: {section} has no setting {key!r}")
            old = getattr(current, key)
            if isinstance(old, float) and type(value) is int:
                value = float(value)
            if isinstance(old, tuple) and isinstance(value, list):
                value = tuple(value)
            if type(value) is not type(old):
                wanted = type(old).__name__
                raise ConfigError(f"{source}: {section}.{key} must be {wanted}: got {value!r}")
            current = replace(current, **{key: value})
        changes[section] = current
    return replace(settings, **changes)
