"""The words of several programs in one stream, each line with the name of who says it."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Literal, TextIO

COLOURS = (32, 36, 35, 33, 34)  # green, cyan, magenta, yellow, blue: red is for what is wrong


class LogStream:
    """Lines of text behind a name, or JSON objects with a field `program`."""

    def __init__(self, stream: TextIO, style: Literal["json", "text"], names: Sequence[str]) -> None:
        self._stream, self._style = stream, style
        width = max(map(len, names))
        colourful = stream.isatty() and not os.environ.get("NO_COLOR")
        self._prefix = {}
        for place, name in enumerate(names):
            prefix = f"{name:<{width}} |"
            self._prefix[name] = f"\x1b[{COLOURS[place % len(COLOURS)]}m{prefix}\x1b[0m" if colourful else prefix

    def write(self, name: str, text: str) -> None:
        """Never fails: a service matters more than its log, which may have lost its reader."""
        if self._style == "json":
            shown = _with_program(text, name)
        else:
            shown = "\n".join(f"{self._prefix[name]} {line}" for line in text.split("\n"))
        with suppress(OSError, ValueError):
            self._stream.write(f"{shown}\n")
            self._stream.flush()


class OwnLines(logging.Handler):
    """What this process logs itself, in the same stream."""

    def __init__(self, stream: LogStream, name: str) -> None:
        super().__init__()
        self._log_stream, self._program = stream, name

    def emit(self, record: logging.LogRecord) -> None:
        self._log_stream.write(self._program, self.format(record))


def _with_program(line: str, name: str) -> str:
    """What is no JSON (a traceback, a library's warning) becomes some, so that machines can read every line."""
    record = None
    with suppress(ValueError, RecursionError):
        record = json.loads(line)
    if not isinstance(record, dict):
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        record = {"time": now, "level": "info", "message": line}
    return json.dumps({**record, "program": name}, ensure_ascii=False)
