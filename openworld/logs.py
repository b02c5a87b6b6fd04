"""Log formats: one JSON object per line for machines, plain text on a terminal; and one stream for several programs."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

PACKAGES = ("models", "tasks", "trainer", "service", "openworld")
COLOURS = (32, 36, 35, 33, 34)  # ANSI green, cyan, magenta, yellow, blue; red marks errors


class JsonFormatter(logging.Formatter):
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


class TextFormatter(logging.Formatter):
    """One line for people; `extra={"fields": {...}}` follows the message as name=value."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        fields = " ".join(f"{name}={value}" for name, value in getattr(record, "fields", {}).items())
        return f"{super().format(record)}{'  ' if fields else ''}{fields}"


def resolve_style(style: Literal["auto", "json", "text"]) -> Literal["json", "text"]:
    """`auto` is text if stderr is a terminal, JSON otherwise."""
    return ("text" if sys.stderr.isatty() else "json") if style == "auto" else style


def set_up(level: str, style: Literal["auto", "json", "text"], handler: logging.Handler | None = None) -> None:
    """Log to `handler`, stderr by default: stdout is for the results of commands. Libraries log warnings only."""
    handler = handler or logging.StreamHandler(sys.stderr)
    handler.setFormatter(TextFormatter() if resolve_style(style) == "text" else JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(logging.WARNING, logging.getLevelName(level.upper())))
    for package in PACKAGES:
        logging.getLogger(package).setLevel(level.upper())


class LogStream:
    """One stream for several programs: text lines after the program's name, or JSON objects with a field `program`."""

    def __init__(self, stream: TextIO, style: Literal["json", "text"], names: Sequence[str]) -> None:
        self._stream, self._style = stream, style
        width = max(map(len, names))
        coloured = stream.isatty() and not os.environ.get("NO_COLOR")
        self._prefix = {}
        for number, name in enumerate(names):
            prefix = f"{name:<{width}} |"
            self._prefix[name] = f"\x1b[{COLOURS[number % len(COLOURS)]}m{prefix}\x1b[0m" if coloured else prefix

    def write(self, name: str, text: str) -> None:
        """Write lines of one program. Errors are ignored: a closed log must not stop the service."""
        if self._style == "json":
            shown = _with_program(text, name)
        else:
            shown = "\n".join(f"{self._prefix[name]} {line}" for line in text.split("\n"))
        with suppress(OSError, ValueError):
            self._stream.write(f"{shown}\n")
            self._stream.flush()


class LogStreamHandler(logging.Handler):
    """Writes the log records of this process to a LogStream."""

    def __init__(self, stream: LogStream, name: str) -> None:
        super().__init__()
        self._log_stream, self._program = stream, name

    def emit(self, record: logging.LogRecord) -> None:
        self._log_stream.write(self._program, self.format(record))


def _with_program(line: str, name: str) -> str:
    """Add the program to a JSON object; wrap any other line (a traceback, a library's warning) in one."""
    record = None
    with suppress(ValueError, RecursionError):
        record = json.loads(line)
    if not isinstance(record, dict):
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        record = {"time": now, "level": "info", "message": line}
    return json.dumps({**record, "program": name}, ensure_ascii=False)
