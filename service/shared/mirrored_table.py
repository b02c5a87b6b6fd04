"""The table of the shared inbox: SQLite for queries, and the rows that have changed for Redis, which keeps them."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from service.inbox.records import IndexEntry, Now, Sighting
from service.inbox.similarity import ImageInfo
from service.inbox.table import InboxTable
from service.wire.novelties import NoveltyState

_BLOBS = ("hash", "embedding")


class Changes(NamedTuple):
    """The rows as they are now, and the novelties that have none any more."""

    rows: dict[str, bytes]
    deleted: set[str]


class MirroredTable(InboxTable):
    """Remembers which rows have changed since `take_changes`."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._changed: set[str] = set()
        self._deleted: set[str] = set()

    def load(self, rows: Iterable[bytes], ran: float) -> None:
        """Fill an empty table with rows that `take_changes` has returned."""
        with self._translate_errors(), self._connection:
            for row in map(_unpack, rows):
                names, marks = ", ".join(row), ", ".join(f":{name}" for name in row)
                self._connection.execute(f"INSERT INTO novelties ({names}) VALUES ({marks})", row)
        self.save_ran(ran)

    def take_changes(self) -> Changes:
        changed, deleted = self._changed, self._deleted
        self._changed, self._deleted = set(), set()
        found = self._query(
            "SELECT * FROM novelties WHERE id IN (SELECT value FROM json_each(?))", json.dumps(list(changed))
        )
        return Changes({row["id"]: _pack(dict(row)) for row in found}, deleted)

    def insert(self, id: str, sighting: Sighting, now: Now, info: ImageInfo) -> IndexEntry:
        entry = super().insert(id, sighting, now, info)
        self._mark([id])
        return entry

    def fold(self, id: str, sighting: Sighting, now: Now, state: NoveltyState | None = None) -> None:
        super().fold(id, sighting, now, state)
        self._mark([id])

    def set_state(self, ids: Iterable[str], state: NoveltyState, was: Collection[NoveltyState]) -> list[str]:
        changed = super().set_state(ids, state, was)
        self._mark(changed)
        return changed

    def delete(self, ids: Iterable[str]) -> None:
        gone = set(ids)
        super().delete(gone)
        self._changed -= gone
        self._deleted |= gone

    def _mark(self, ids: Iterable[str]) -> None:
        self._changed.update(ids)
        self._deleted.difference_update(ids)


def _pack(row: dict[str, Any]) -> bytes:
    blobs = {name: b64encode(row[name]).decode() for name in _BLOBS if row[name] is not None}
    return json.dumps(row | blobs).encode()


def _unpack(data: bytes) -> dict[str, Any]:
    row: dict[str, Any] = json.loads(data)
    return row | {name: b64decode(row[name]) for name in _BLOBS if row[name] is not None}
