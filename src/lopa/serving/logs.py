"""Logs: one line an event, plain for people or JSON for machines. No prompt is ever logged."""

from __future__ import annotations

import json
import logging
import sys
import time
from contextvars import ContextVar
from typing import Any

request_id: ContextVar[str | None] = ContextVar("lopa_request_id", default=None)

_PLAIN = set(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message"}


def set_up(style: str | None) -> None:
    """Send the logs of lopa and uvicorn to standard error."""
    style = style or ("plain" if sys.stderr.isatty() else "json")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Json() if style == "json" else Plain())
    for name, level in (("lopa", logging.INFO), ("uvicorn", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    own = {k: v for k, v in vars(record).items() if k not in _PLAIN and v is not None}
    current = request_id.get()
    return {"request_id": current, **own} if current else own


class Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class Plain(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%H:%M:%S", time.localtime(record.created))
        words = " ".join(f"{k}={_short(v)}" for k, v in _fields(record).items())
        line = f"{stamp} {record.levelname.lower():7} {record.getMessage()} {words}".rstrip()
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    text = str(value)
    return json.dumps(text) if " " in text or not text.isprintable() else text
