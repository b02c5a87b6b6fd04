"""What is known of each picture of the inbox, in one SQLite file.

**Every change is whole or absent after a kill; after a power cut the last few may be missing, and the rest is whole.**
One process has the file: the inbox keeps an index of it in memory, which another writer would make wrong.
"""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from models.errors import StoreError
from service.inbox.likeness import unit
from service.inbox.look import Look
from service.inbox.records import STATES, Novelty, Page, Sighting, State

SCHEMA = 1
LOCK_SECONDS = 1.0  # for a predecessor that is just closing; nobody else has the file
LARGEST_CURSOR = 2**63 - 1  # more is no integer to SQLite

# `seen` numbers the sightings: the order of last_seen, without its ties and whatever the clock does.
_CREATE = f"""
BEGIN;
CREATE TABLE novelties (
    id TEXT PRIMARY KEY,
    seen INTEGER NOT NULL UNIQUE,
    first_seen REAL NOT NULL,
    last_seen REAL NOT NULL,
    count INTEGER NOT NULL,
    state TEXT NOT NULL,
    version INTEGER NOT NULL,
    score REAL,
    calibrated_score REAL NOT NULL,
    p_novel REAL NOT NULL,
    nearest TEXT NOT NULL,
    prediction_id TEXT NOT NULL,
    client TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    width INTEGER NOT NULL,
    height INTEGER NOT NULL,
    hash BLOB NOT NULL,
    embedding BLOB
);
CREATE INDEX novelties_listed ON novelties (state, seen);
CREATE INDEX novelties_least ON novelties (state = 'new', seen);
CREATE INDEX novelties_aged ON novelties (last_seen);
PRAGMA user_version = {SCHEMA};
COMMIT;
"""


class Entry(NamedTuple):
    """What the index in memory needs of a row."""

    id: str
    state: State
    bytes: int
    hash: int
    embedding: NDArray[np.float32] | None


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
            self._connection.executescript(_CREATE)

    # Reading

    def get(self, id: str) -> Novelty | None:
        with self._reported():
            row = self._connection.execute("SELECT * FROM novelties WHERE id = ?", (id,)).fetchone()
        return None if row is None else _novelty(row)

    def page(self, state: State, limit: int, before: int | None) -> Page:
        cursor = LARGEST_CURSOR if before is None else max(0, min(before, LARGEST_CURSOR))
        query = "SELECT * FROM novelties WHERE state = ? AND seen < ? ORDER BY seen DESC LIMIT ?"
        with self._reported():
            # One more than asked for tells whether there is a next page.
            rows = self._connection.execute(query, (state, cursor, limit + 1)).fetchall()
        more, rows = len(rows) > limit, rows[:limit]
        return Page(tuple(_novelty(row) for row in rows), rows[-1]["seen"] if more else None)

    def counts(self) -> dict[State, int]:
        with self._reported():
            found = dict(self._connection.execute("SELECT state, count(*) FROM novelties GROUP BY state").fetchall())
        return {state: found.get(state, 0) for state in STATES}

    def entries(self) -> Iterator[Entry]:
        with self._reported():
            for row in self._connection.execute("SELECT id, state, bytes, hash, embedding FROM novelties"):
                hash = int.from_bytes(row["hash"], "big")
                yield Entry(row["id"], row["state"], row["bytes"], hash, _unpacked(row["embedding"]))

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
        packed = _packed(sighting.embedding)
        values = _answer(sighting) | {
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
        }
        names = ", ".join(values)
        marks = ", ".join(f":{name}" for name in values)
        self._write_seen(f"INSERT INTO novelties ({names}, seen) VALUES ({marks}, :seen)", values)
        return Entry(id, "new", len(sighting.data), look.hash, _unpacked(packed))

    def fold(self, id: str, sighting: Sighting, now: float) -> None:
        """One more sighting of a row; its answer replaces the one before."""
        answer = _answer(sighting)
        changes = ", ".join(f"{name} = :{name}" for name in answer)
        self._write_seen(
            f"UPDATE novelties SET {changes}, count = count + 1, last_seen = :now, seen = :seen WHERE id = :id",
            answer | {"id": id, "now": now},
        )

    def set_state(self, ids: Iterable[str], state: State) -> None:
        with self._reported(), self._connection:
            self._connection.executemany("UPDATE novelties SET state = ? WHERE id = ?", [(state, id) for id in ids])

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


def _answer(sighting: Sighting) -> dict[str, Any]:
    """The columns that each sighting renews. What is not a number goes to the novel end: JSON has no NaN."""
    score = sighting.score
    return {
        "version": sighting.version,
        "score": None if score is None or not math.isfinite(score) else float(score),
        "calibrated_score": _finite(sighting.calibrated_score, 0.0),
        "p_novel": _finite(sighting.p_novel, 1.0),
        "nearest": json.dumps([[name, _finite(share, 0.0)] for name, share in sighting.nearest]),
        "prediction_id": sighting.prediction_id,
        "client": sighting.client,
    }


def _finite(value: float, otherwise: float) -> float:
    return float(value) if math.isfinite(value) else otherwise


def _novelty(row: sqlite3.Row) -> Novelty:
    values = dict(row)
    del values["seen"], values["hash"]
    values["nearest"] = [(name, share) for name, share in json.loads(values["nearest"])]
    values["embedding"] = _unpacked(values["embedding"])
    return Novelty(**values)


def _packed(embedding: NDArray[np.float32] | None) -> bytes | None:
    # Only the direction is kept: of length 1, no number can overflow the half precision.
    direction = None if embedding is None else unit(embedding)
    return None if direction is None else direction.astype("<f2").tobytes()


def _unpacked(blob: bytes | None) -> NDArray[np.float32] | None:
    return None if blob is None else unit(np.frombuffer(blob, dtype="<f2"))
