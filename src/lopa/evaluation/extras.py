"""Optional packages: asked for inside the command that needs them, missed in one line."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from lopa.errors import ConfigError


def require(module: str, extra: str, what: str) -> Any:
    """The module; where it or something that it needs is missing, the way to get it."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{what} needs a package that is not here ({error.name or error}): "
            f"pip install 'lopa[{extra}]'"
        ) from error
