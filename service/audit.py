"""The audit log: an append-only file in the data folder with one JSON object per line, for every change."""

from __future__ import annotations

import getpass
import os
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

from pydantic import ValidationError

from models.files import append_durable, file_lock, make_folder
from service.wire.audit import AuditEntry, AuditPage

FILE, LOCK = "audit.jsonl", ".audit.lock"
BLOCK = 2**16  # bytes read at a time, from the end


class AuditLog:
    """The audit log of a data folder. Several servers and commands may append to it at the same time."""

    def __init__(self, data: Path) -> None:
        self._data, self._path = data, data / FILE

    def record(self, entry: AuditEntry) -> None:
        """Append an entry durably. OSError if it cannot be written."""
        make_folder(self._data)
        with file_lock(self._data / LOCK):
            append_durable(self._path, entry.model_dump_json(exclude_none=True).encode())

    def record_command(self, action: str, target: str, **detail: object) -> None:
        """Append an entry for a command line on this machine."""
        by = f"{_user()} on the command line"
        self.record(AuditEntry(time=datetime.now(UTC), by=by, action=action, target=target, detail=detail))

    def page(self, limit: int, before: int | None = None) -> AuditPage:
        """Entries, newest first. A cursor is a position in the file, which stays valid because the file only grows."""
        items: list[AuditEntry] = []
        try:
            with self._path.open("rb") as file:
                end = file.seek(0, os.SEEK_END)
                for start, line in _lines_backwards(file, min(end, before if before is not None else end)):
                    try:
                        items.append(AuditEntry.model_validate_json(line))
                    except ValidationError:
                        continue  # cut short by a crash
                    if len(items) == limit:
                        return AuditPage(items=items, next_cursor=start or None)
        except FileNotFoundError:
            pass  # nothing has been changed yet
        return AuditPage(items=items, next_cursor=None)


def _lines_backwards(file: BinaryIO, end: int) -> Iterator[tuple[int, bytes]]:
    """Lines that end before `end`, last first, each with the position at which it starts."""
    rest = b""
    while end > 0:
        start = max(0, end - BLOCK)
        file.seek(start)
        lines = (file.read(end - start) + rest).split(b"\n")
        # The first line may start in the block before.
        rest, lines = lines[0], lines[1:]
        position = start + len(rest) + 1 + sum(len(line) + 1 for line in lines)
        for line in reversed(lines):
            position -= len(line) + 1
            if line:
                yield position, line
        end = start
    if rest:
        yield 0, rest


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return f"user {os.getuid()}"
