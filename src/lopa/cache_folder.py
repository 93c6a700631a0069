"""Where what is computed once is kept between runs."""

from __future__ import annotations

import os
from pathlib import Path

CACHE_VARIABLE = "LOPA_CACHE_DIR"  # in place of the user's cache folder


def cache_folder(kind: str) -> Path:
    """May begin with ~; nobody says that it is there or can be written."""
    if own := os.environ.get(CACHE_VARIABLE):
        return Path(own) / kind
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "lopa" / kind
