"""LoPA: lookahead parallel decoding for diffusion language models.

Names are imported when first used, so that `import lopa` and the command line's help stay fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lopa.version import VERSION

if TYPE_CHECKING:
    from lopa.config import DecodeConfig as DecodeConfig
    from lopa.engine.llm import LLM as LLM
    from lopa.engine.output import Event as Event
    from lopa.engine.output import Output as Output
    from lopa.errors import LopaError as LopaError
    from lopa.types import Round as Round
    from lopa.types import Trace as Trace

_HOMES = {
    "LLM": "lopa.engine.llm",
    "DecodeConfig": "lopa.config",
    "Event": "lopa.engine.output",
    "LopaError": "lopa.errors",
    "Output": "lopa.engine.output",
    "Round": "lopa.types",
    "Trace": "lopa.types",
}
__version__ = VERSION
__all__ = ["LLM", "DecodeConfig", "Event", "LopaError", "Output", "Round", "Trace", "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'lopa' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
