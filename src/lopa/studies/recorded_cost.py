"""What rounds cost on some device, read from the records of other commands."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lopa.decoding.round_cost import RoundCost
from lopa.errors import ConfigError


def read_costs(paths: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """By model and device, from files of a round cost, of `study speed` or of `bench round`."""
    found = {}
    for path in paths:
        try:
            run = json.loads(path.read_text(encoding="utf-8"))
            if "points" in run:
                host, cost = run.get("about", run), RoundCost.of(run)  # as kept, or as written
            elif run.get("study") == "speed":
                host, cost = run["host"], RoundCost.of(run["findings"]["round_cost"])
            else:
                measured = {int(r["tokens"]): r["round_ms"] / 1e3 for r in run["rounds"]}
                host, cost = run["host"], RoundCost.of(sorted(measured.items()))
            kind = host.get("quantize") or host["dtype"].removeprefix("torch.")
            name = f"{host['model']}, {kind}, {host['device']}"
        except OSError as error:
            raise ConfigError(f"cannot read {path} ({error.strerror})") from None
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ConfigError(
                f"{path} is no round cost, and no file of `study speed` or `bench round`"
            ) from None
        found[name] = cost.settings()
    return found
