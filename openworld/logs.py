"""Logs that machines can read: one JSON object a line, or plain text on a terminal."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, Literal

OURS = ("models", "tasks", "trainer", "service", "openworld")


class JsonLines(logging.Formatter):
    """`extra={"fields": {...}}` of a log call becomes top-level fields."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class Text(logging.Formatter):
    """The same for people."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        fields = " ".join(f"{name}={value}" for name, value in getattr(record, "fields", {}).items())
        return f"{super().format(record)}{'  ' if fields else ''}{fields}"


def set_up(level: str, style: Literal["auto", "json", "text"]) -> None:
    """Everything to stderr; stdout belongs to commands' results."""
    handler = logging.StreamHandler(sys.stderr)
    text = style == "text" or (style == "auto" and sys.stderr.isatty())
    handler.setFormatter(Text() if text else JsonLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    # Libraries speak when something is wrong; what they do is ours to say.
    root.setLevel(max(logging.WARNING, logging.getLevelName(level.upper())))
    for ours in OURS:
        logging.getLogger(ours).setLevel(level.upper())
