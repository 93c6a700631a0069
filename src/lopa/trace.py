"""Traces as JSON Lines: a `run` line, one `round` line a round, an `end` line.

What the terminal view, the web page and the studies read. `read` gives back what `write` was
given; a file is written whole or not at all.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

from lopa.atomic_write import write_lines
from lopa.errors import LopaError
from lopa.types import BlockView, Branch, Fill, Lookahead, Opinion, Round, Trace

_VERSION = 2
_MAX_BYTES = 2**30  # of a file
_MAX_NUMBER = 10_000_000  # of positions, tokens and counts: beyond any context or vocabulary

_Record = TypeVar("_Record", Round, Branch, Fill, Lookahead, Opinion, BlockView)


def lines(trace: Trace) -> Iterator[str]:
    head = {"prompt_ids": trace.prompt_ids, "settings": trace.settings}
    yield _line("run", {"version": _VERSION, **head, **gap_fields(trace)})
    for record in trace.rounds:
        yield _line("round", asdict(record))
    pieces = {str(key): piece for key, piece in trace.pieces.items()}
    tail = {"token_ids": trace.token_ids, "finish": trace.finish, "pieces": pieces}
    yield _line("end", tail)


def gap_fields(trace: Trace) -> dict[str, Any]:
    """What a run line has where text is pinned behind gaps."""
    if not trace.pinned_ids:
        return {}
    return {"pinned_ids": trace.pinned_ids, "gap_tokens": trace.gap_tokens}


def write(trace: Trace, path: Path) -> None:
    write_lines(path, lines(trace))


def read(path: Path) -> Trace:
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ValueError(f"it is larger than {_MAX_BYTES} bytes")
        return parse(path.read_text(encoding="utf-8").split("\n"))
    except OSError as error:
        raise LopaError(f"cannot read {path} ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise LopaError(f"{path} is not a complete lopa trace ({error})") from None


def parse(source: Iterable[str]) -> Trace:
    records = [json.loads(line) for line in source if line.strip()]
    kinds = [record.pop("type") for record in records]
    if len(kinds) < 2 or kinds[0] != "run" or kinds[-1] != "end":
        raise ValueError("it must begin with a run line and finish with an end line")
    if set(kinds[1:-1]) - {"round"}:
        raise ValueError("between its ends there may be nothing but rounds")
    if records[0]["version"] != _VERSION:
        raise ValueError(f"version {records[0]['version']} where {_VERSION} is read")
    return Trace(
        prompt_ids=records[0]["prompt_ids"],
        settings=records[0]["settings"],
        pinned_ids=records[0].get("pinned_ids", []),
        gap_tokens=records[0].get("gap_tokens", []),
        rounds=[_round(number, record) for number, record in enumerate(records[1:-1], 1)],
        token_ids=records[-1]["token_ids"],
        finish=records[-1]["finish"],
        pieces={int(key): piece for key, piece in records[-1]["pieces"].items()},
    )


def _line(kind: str, record: dict[str, Any]) -> str:
    return json.dumps({"type": kind, **record}, ensure_ascii=False, allow_nan=False)


def _round(number: int, raw: dict[str, Any]) -> Round:
    try:
        branches = [
            {
                **b,
                "lookaheads": _lookaheads(b["lookaheads"]),
                "anchor": [_record(Opinion, opinion) for opinion in b["anchor"]],
            }
            for b in raw["branches"]
        ]
        made = {
            **raw,
            "branches": [_record(Branch, b) for b in branches],
            "fills": [_record(Fill, f) for f in raw["fills"]],
            "spawned": [_lookaheads(draft) for draft in raw["spawned"]],
            "blocks": [_record(BlockView, b) for b in raw["blocks"]],
        }
        return _record(Round, made)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"round {number}: {error}") from None


def _lookaheads(raw: list[dict[str, Any]]) -> list[Lookahead]:
    return [_record(Lookahead, lookahead) for lookahead in raw]


def _record(kind: type[_Record], raw: dict[str, Any]) -> _Record:
    for field in fields(kind):
        value = raw.get(field.name)
        if field.type == "int" and not (type(value) is int and 0 <= value <= _MAX_NUMBER):
            raise ValueError(f"{field.name} is missing or out of range")
    return kind(**raw)
