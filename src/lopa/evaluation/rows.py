"""Rows of a benchmark from a local file: JSON, JSON Lines (either gzipped) or Parquet."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lopa.errors import ConfigError

Row = dict[str, Any]


def read_rows(path: Path, name: str, needed: Sequence[str]) -> list[Row]:
    """The rows of benchmark `name`, each with the fields that it needs."""
    try:
        rows = _parse(path)
    except OSError as error:
        raise ConfigError(f"cannot read {path} ({error.strerror or error})") from None
    except ImportError:
        raise ConfigError(
            f"{path}: Parquet needs pyarrow: pip install pyarrow, or give JSON Lines"
        ) from None
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON, JSON Lines or Parquet of rows ({error})") from None
    if not rows:
        raise ConfigError(f"{path} holds no rows: give a file with the rows of {name}")
    for number, row in enumerate(rows, 1):
        missing = [f for f in needed if not isinstance(row, dict) or row.get(f) is None]
        if missing:
            raise ConfigError(
                f"{path}: row {number} has no {missing[0]}; {name} needs {', '.join(needed)}"
            )
    return rows


def _parse(path: Path) -> list[Any]:
    suffixes = path.suffixes[-2:]
    if path.suffix == ".parquet":
        from pyarrow.parquet import read_table

        rows: list[Any] = read_table(path).to_pylist()
        return rows
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as file:
        if ".json" in suffixes:
            found = json.load(file)
            if not isinstance(found, list):
                raise ValueError("it is no list")
            return found
        return [json.loads(line) for line in file if line.strip()]
