"""What is known of each picture of the inbox, in one SQLite file.

**Every change is whole or absent after a kill; after a power cut the last few may be missing, and the rest is whole.**
One process has the file: the inbox keeps an index of it in memory, which another writer would make wrong.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from models.errors import StoreError
from service.inbox.look import Look
from service.inbox.records import STATES, Novelty, Only, Page, Sighting
from service.inbox.rows import Entry, Listed, answer_columns, novelty_of, packed_embedding, unpacked_embedding
from service.inbox.schema import CREATE, FROM_1, SCHEMA
from service.wire.novelties import NoveltyState

LOCK_SECONDS = 1.0  # for a predecessor that is just closing; nobody else has the file
LARGEST_CURSOR = 2**63 - 1  # more is no integer to SQLite

_IDS = "(SELECT value FROM json_each(?))"  # a list as one parameter, whatever its length


class InboxTable:
    """The rows of the inbox. Not thread-safe: the inbox's lock is around it. Every failure is a `StoreError`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with self._reported():
            self._connection = sqlite3.connect(path, timeout=LOCK_SECONDS, check_same_thread=False)
            self._connection.row_factory = sqlite3.Row
            try:
                self._set_up()
                last = self._connection.execute("SELECT max(seen) FROM novelties").fetchone()[0]
            except BaseException:
                self._connection.close()
                raise
        self._seen: int = last or 0

    def _set_up(self) -> None:
        execute = self._connection.execute
        # Before the first access to the log: the lock then lasts until close, and the log needs no shared memory,
        # which network file systems do not have.
        execute("PRAGMA locking_mode = EXCLUSIVE")
        schema = execute("PRAGMA user_version").fetchone()[0]
        if schema > SCHEMA:
            raise StoreError(
                f"{self._path} has schema {schema}, this version of openworld knows up to {SCHEMA}: "
                "install the newer openworld again, or move the file away to start with an empty inbox"
            )
        execute("PRAGMA journal_mode = WAL")
        execute("PRAGMA synchronous = NORMAL")
        if schema == 0:
            self._connection.executescript(CREATE)
        elif schema == 1:
            self._connection.executescript(FROM_1)

    # Reading

    def get(self, id: str) -> Novelty | None:
        with self._reported():
            row = self._connection.execute("SELECT * FROM novelties WHERE id = ?", (id,)).fetchone()
        return None if row is None else novelty_of(row)

    def page(
        self, state: NoveltyState, limit: int, before: int | None, only: Only, ids: Collection[str] | None
    ) -> Page:
        """Some rows, last seen first; `ids` stands for the group of `only`, of which the table knows nothing."""
        cursor = LARGEST_CURSOR if before is None else max(0, min(before, LARGEST_CURSOR))
        conditions: dict[str, Any] = {"state = ?": state, "seen < ?": cursor}
        conditions |= {"version = ?": only.version, "client = ?": only.client, "last_seen >= ?": only.since}
        conditions[f"id IN {_IDS}"] = None if ids is None else json.dumps(list(ids))
        conditions = {test: value for test, value in conditions.items() if value is not None}
        query = f"SELECT * FROM novelties WHERE {' AND '.join(conditions)} ORDER BY seen DESC LIMIT ?"
        with self._reported():
            # One more than asked for tells whether there is a next page.
            rows = self._connection.execute(query, (*conditions.values(), limit + 1)).fetchall()
        more, rows = len(rows) > limit, rows[:limit]
        return Page(tuple(novelty_of(row) for row in rows), rows[-1]["seen"] if more else None)

    def listed(self, state: NoveltyState) -> list[Listed]:
        """The ids in a state, last seen first."""
        query = "SELECT id, seen, last_seen FROM novelties WHERE state = ? ORDER BY seen DESC"
        with self._reported():
            return [Listed(*row) for row in self._connection.execute(query, (state,))]

    def named(self, ids: Iterable[str]) -> dict[str, Novelty]:
        """The rows of some ids, as far as they are there."""
        with self._reported():
            rows = self._connection.execute(f"SELECT * FROM novelties WHERE id IN {_IDS}", (json.dumps(list(ids)),))
            return {row["id"]: novelty_of(row) for row in rows}

    def counts(self) -> dict[NoveltyState, int]:
        with self._reported():
            found = dict(self._connection.execute("SELECT state, count(*) FROM novelties GROUP BY state").fetchall())
        return {state: found.get(state, 0) for state in STATES}

    def entries(self) -> Iterator[Entry]:
        """All of them, in the order in which they came: groups are built in it."""
        query = "SELECT id, state, bytes, hash, embedding FROM novelties ORDER BY first_seen, rowid"
        with self._reported():
            for row in self._connection.execute(query):
                hash = int.from_bytes(row["hash"], "big")
                yield Entry(row["id"], row["state"], row["bytes"], hash, unpacked_embedding(row["embedding"]))

    def least_wanted(self) -> str | None:
        """The id to give up first: what people are done with before what is new, then the longest unseen."""
        with self._reported():
            query = "SELECT id FROM novelties ORDER BY state = 'new', seen LIMIT 1"
            row = self._connection.execute(query).fetchone()
        return None if row is None else str(row["id"])

    def older_than(self, moment: float) -> tuple[str, ...]:
        """The ids last seen before a moment."""
        with self._reported():
            rows = self._connection.execute("SELECT id FROM novelties WHERE last_seen < ?", (moment,)).fetchall()
        return tuple(row["id"] for row in rows)

    # Writing: each is one transaction

    def insert(self, id: str, sighting: Sighting, now: float, look: Look) -> Entry:
        """A new row; returns the entry as it would be read again."""
        packed = packed_embedding(sighting.embedding)
        values = answer_columns(sighting) | {
            "id": id,
            "first_seen": now,
            "last_seen": now,
            "count": 1,
            "state": "new",
            "bytes": len(sighting.data),
            "width": look.width,
            "height": look.height,
            "hash": look.hash.to_bytes(8, "big"),
            "embedding": packed,
            "note": sighting.note,
        }
        names = ", ".join(values)
        marks = ", ".join(f":{name}" for name in values)
        self._write_seen(f"INSERT INTO novelties ({names}, seen) VALUES ({marks}, :seen)", values)
        return Entry(id, "new", len(sighting.data), look.hash, unpacked_embedding(packed))

    def fold(self, id: str, sighting: Sighting, now: float, state: NoveltyState | None = None) -> None:
        """One more sighting of a row; its answer replaces the one before, its note when it has one."""
        answer = answer_columns(sighting)
        changes = ", ".join(f"{name} = :{name}" for name in answer)
        also = "note = coalesce(:note, note), state = coalesce(:state, state)"
        self._write_seen(
            f"UPDATE novelties SET {changes}, {also}, count = count + 1, last_seen = :now, seen = :seen WHERE id = :id",
            answer | {"id": id, "now": now, "note": sighting.note, "state": state},
        )

    def set_state(self, ids: Iterable[str], state: NoveltyState, was: Collection[NoveltyState] = STATES) -> list[str]:
        """Change those of the ids that are in one of the states `was`; returns which."""
        query = f"UPDATE novelties SET state = ? WHERE id IN {_IDS} AND state IN {_IDS} RETURNING id"
        values = (state, json.dumps(list(ids)), json.dumps(list(was)))
        with self._reported(), self._connection:
            return [row["id"] for row in self._connection.execute(query, values).fetchall()]

    def delete(self, ids: Iterable[str]) -> None:
        with self._reported(), self._connection:
            self._connection.executemany("DELETE FROM novelties WHERE id = ?", [(id,) for id in ids])

    def close(self) -> None:
        with self._reported():
            self._connection.close()

    # Details

    def _write_seen(self, statement: str, values: dict[str, Any]) -> None:
        with self._reported(), self._connection:
            self._connection.execute(statement, values | {"seen": self._seen + 1})
        self._seen += 1

    @contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise StoreError(f"{self._path}: {error}: {_remedy(error)}") from error


def _remedy(error: sqlite3.Error) -> str:
    # The code's low byte is its family: SQLITE_BUSY_RECOVERY is a SQLITE_BUSY.
    match getattr(error, "sqlite_errorcode", 0) & 0xFF:
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            return "another process has this inbox open, give each server a data folder of its own"
        case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_NOTADB:
            return "the file is damaged, move it away to start with an empty inbox"
        case _:
            return "check the data folder's space and rights"
