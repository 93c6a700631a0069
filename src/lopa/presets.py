"""The settings published with the paper, by task."""

from __future__ import annotations

from typing import Any

from lopa.errors import ConfigError

# How the paper looks ahead, whatever is the default here.
PAPER: dict[str, Any] = {
    "accept": "score",
    "score": "mean",
    "creation_weight": 0.0,
    "lookahead_floor": 0.0,
    "lookahead_eos": True,
}
_PUBLISHED: dict[str, Any] = {
    "decoder": "lopa",
    "max_new_tokens": 512,
    "activate_at": 0.95,
    **PAPER,
}
_CODE = {"block_size": 32, "append_at": 0.3}
PRESETS: dict[str, dict[str, Any]] = {
    "paper": {"block_size": 32, "append_at": 0.1, "threshold": 0.90, "branches": 7},
    # D2F-Dream
    "gsm8k": {"block_size": 32, "append_at": 0.1, "threshold": 0.90, "branches": 14},
    "math": {"block_size": 16, "append_at": 0.1, "threshold": 0.90, "branches": 7},
    "humaneval": {**_CODE, "threshold": 0.95, "branches": 7},
    "mbpp": {**_CODE, "threshold": 0.95, "branches": 7},
    # D2F-DiffuCoder, which ranks by max_prob
    "humaneval+": {**_CODE, "threshold": 0.95, "branches": 6, "ranking": "max_prob"},
    "mbpp+": {**_CODE, "threshold": 0.90, "branches": 14, "ranking": "max_prob"},
}


def preset_options(task: str) -> dict[str, Any]:
    """Fields of `DecodeConfig`."""
    if task not in PRESETS:
        raise ConfigError(f"no preset {task!r}: choose from {', '.join(PRESETS)}")
    return {**_PUBLISHED, **PRESETS[task]}
