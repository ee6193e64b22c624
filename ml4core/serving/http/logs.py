"""Log lines, for people or for programs."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any


class _Json(logging.Formatter):
    """An object a line."""

    def format(self, record: logging.LogRecord) -> str:
        told: dict[str, Any] = {
            "time": _iso(record.created, record.msecs),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
        }
        told |= getattr(record, "fields", {})
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        return json.dumps(told, default=str)


class _Text(logging.Formatter):
    """Time, event, and fields as ``key=value``."""

    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", {})
        words = [f"{key}={_shown(value)}" for key, value in fields.items() if value is not None]
        level = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        moment = _iso(record.created, record.msecs)
        line = " ".join([moment, level + record.getMessage(), *words])
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def set_up(form: str) -> logging.Logger:
    """The server's logger, which writes to stderr. ``form``: ``text`` or ``json``."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if form == "json" else _Text())
    for name in ("ml4core.serving", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(logging.INFO if name.startswith("ml4core") else logging.WARNING)
    return logging.getLogger("ml4core.serving")


def _iso(seconds: float, millis: float) -> str:
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{int(millis):03d}Z"


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    text = str(value)  # a path may hold anything: no line of it may pass for one of the log's
    return text if text.isprintable() else ascii(text)
