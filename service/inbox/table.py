"""The SQLite table of the inbox, one row per novelty.

**After a kill every change is complete or absent; after a power cut the last few may be missing, and the others are
complete.** One process owns the file: the inbox has an index of it in memory, which another writer would invalidate.
"""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.errors import StoreError
from service.inbox.records import STATES, IndexEntry, ListedNovelty, Novelty, NoveltyFilter, NoveltyPage, Now, Sighting
from service.inbox.similarity import ImageInfo, unit_vector
from service.wire.novelties import NoveltyState

LOCK_SECONDS = 1.0  # wait this long for a server that is closing the file
MAX_CURSOR = 2**63 - 1  # the largest integer of SQLite

SCHEMA = 3
# `seen` numbers the sightings: the order of `last_seen`, but without ties and independent of the clock.
CREATE = f"""
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
    embedding BLOB,
    label TEXT,
    note TEXT,
    ran REAL NOT NULL
);
CREATE INDEX novelties_listed ON novelties (state, seen);
CREATE INDEX novelties_least ON novelties (state = 'new', seen);
CREATE INDEX novelties_aged ON novelties (ran);
CREATE TABLE running (seconds REAL NOT NULL);
INSERT INTO running VALUES (0);
PRAGMA user_version = {SCHEMA};
COMMIT;
"""

# From schema 2. The ages of the novelties, by the wall clock, are kept relative to the newest one.
FROM_2 = f"""
BEGIN;
ALTER TABLE novelties ADD COLUMN ran REAL NOT NULL DEFAULT 0;
UPDATE novelties SET ran = last_seen - (SELECT max(last_seen) FROM novelties);
DROP INDEX novelties_aged;
CREATE INDEX novelties_aged ON novelties (ran);
CREATE TABLE running (seconds REAL NOT NULL);
INSERT INTO running VALUES (0);
PRAGMA user_version = {SCHEMA};
COMMIT;
"""

_IDS = "(SELECT value FROM json_each(?))"  # a list as one parameter, of any length


class InboxTable:
    """The rows. Not thread-safe: callers hold the inbox's lock. Every failure is a `StoreError`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with self._translate_errors():
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
        # Before the first access to the write-ahead log: the lock then lasts until close, and the log needs no shared
        # memory, which network file systems lack.
        execute("PRAGMA locking_mode = EXCLUSIVE")
        schema = execute("PRAGMA user_version").fetchone()[0]
        if schema not in (0, 2, SCHEMA):
            raise StoreError(
                f"{self._path} has schema {schema}, this version of openworld reads schema {SCHEMA}: "
                "install the matching openworld, or move the file away: the images stay, their answers are lost"
            )
        execute("PRAGMA journal_mode = WAL")
        execute("PRAGMA synchronous = NORMAL")
        if schema != SCHEMA:
            self._connection.executescript(FROM_2 if schema == 2 else CREATE)

    # Reading

    def get(self, ids: Iterable[str]) -> dict[str, Novelty]:
        """The novelties of those ids that exist."""
        rows = self._query(f"SELECT * FROM novelties WHERE id IN {_IDS}", json.dumps(list(ids)))
        return {row["id"]: _novelty(row) for row in rows}

    def page(
        self,
        state: NoveltyState,
        limit: int,
        before: int | None,
        only: NoveltyFilter,
        ids: Collection[str] | None,
    ) -> NoveltyPage:
        """Some novelties, last seen first. `ids` are the members of `only.group`, which has no column."""
        cursor = MAX_CURSOR if before is None else max(0, min(before, MAX_CURSOR))
        conditions: dict[str, Any] = {"state = ?": state, "seen < ?": cursor}
        conditions |= {"version = ?": only.version, "client = ?": only.client, "last_seen >= ?": only.since}
        conditions[f"id IN {_IDS}"] = None if ids is None else json.dumps(list(ids))
        conditions = {test: value for test, value in conditions.items() if value is not None}
        query = f"SELECT * FROM novelties WHERE {' AND '.join(conditions)} ORDER BY seen DESC LIMIT ?"
        rows = self._query(query, *conditions.values(), limit + 1)  # one more shows whether there is a next page
        more, rows = len(rows) > limit, rows[:limit]
        return NoveltyPage(tuple(_novelty(row) for row in rows), rows[-1]["seen"] if more else None)

    def listed(self, state: NoveltyState) -> list[ListedNovelty]:
        """All novelties in a state, last seen first."""
        query = "SELECT id, seen, last_seen FROM novelties WHERE state = ? ORDER BY seen DESC"
        return [ListedNovelty(*row) for row in self._query(query, state)]

    def counts(self) -> dict[NoveltyState, int]:
        rows = self._query("SELECT state, count(*) AS number FROM novelties GROUP BY state")
        return dict.fromkeys(STATES, 0) | {row["state"]: row["number"] for row in rows}

    def entries(self) -> Iterator[IndexEntry]:
        """All novelties in the order of arrival, in which groups are built."""
        query = "SELECT id, state, bytes, hash, embedding FROM novelties ORDER BY first_seen, rowid"
        with self._translate_errors():
            for row in self._connection.execute(query):
                hash = int.from_bytes(row["hash"], "big")
                yield IndexEntry(row["id"], row["state"], row["bytes"], hash, _unpack_embedding(row["embedding"]))

    def next_to_evict(self) -> str | None:
        """The longest unseen labelled or dismissed novelty; without one, the longest unseen new one."""
        rows = self._query("SELECT id FROM novelties ORDER BY state = 'new', seen LIMIT 1")
        return rows[0]["id"] if rows else None

    def expired(self, ran: float, first_seen: float) -> list[str]:
        """The novelties that were last seen, or first seen, before these times."""
        query = "SELECT id FROM novelties WHERE ran < ? OR first_seen < ?"
        return [row["id"] for row in self._query(query, ran, first_seen)]

    def ran(self) -> float:
        """For how many seconds the inbox was open so far; a kill loses those since the last `save_ran`."""
        query = "SELECT max(seconds, coalesce((SELECT max(ran) FROM novelties), 0)) AS ran FROM running"
        return float(self._query(query)[0]["ran"])

    # Writing: each method is one transaction

    def save_ran(self, seconds: float) -> None:
        with self._translate_errors(), self._connection:
            self._connection.execute("UPDATE running SET seconds = ?", (seconds,))

    def insert(self, id: str, sighting: Sighting, now: Now, info: ImageInfo) -> IndexEntry:
        """Add a row; returns the entry as `entries` would return it."""
        embedding = _pack_embedding(sighting.embedding)
        values = _answer_columns(sighting) | {
            "id": id,
            "first_seen": now.wall,
            "last_seen": now.wall,
            "ran": now.ran,
            "count": 1,
            "state": "new",
            "bytes": info.bytes,
            "width": info.width,
            "height": info.height,
            "hash": info.hash.to_bytes(8, "big"),
            "embedding": embedding,
            "note": sighting.note,
        }
        names = ", ".join(values)
        marks = ", ".join(f":{name}" for name in values)
        self._write_seen(f"INSERT INTO novelties ({names}, seen) VALUES ({marks}, :seen)", values)
        return IndexEntry(id, "new", info.bytes, info.hash, _unpack_embedding(embedding))

    def fold(self, id: str, sighting: Sighting, now: Now, state: NoveltyState | None = None) -> None:
        """Count another sighting of a row. Its answer replaces the previous one, its note too if it has one."""
        answer = _answer_columns(sighting)
        changes = ", ".join(f"{name} = :{name}" for name in answer)
        also = "note = coalesce(:note, note), state = coalesce(:state, state)"
        self._write_seen(
            f"UPDATE novelties SET {changes}, {also}, count = count + 1, last_seen = :wall, ran = :ran, seen = :seen "
            "WHERE id = :id",
            answer | now._asdict() | {"id": id, "note": sighting.note, "state": state},
        )

    def set_state(self, ids: Iterable[str], state: NoveltyState, was: Collection[NoveltyState]) -> list[str]:
        """Change those of the ids that are in one of the states `was`; returns them."""
        query = f"UPDATE novelties SET state = ? WHERE id IN {_IDS} AND state IN {_IDS} RETURNING id"
        with self._translate_errors(), self._connection:
            rows = self._connection.execute(query, (state, json.dumps(list(ids)), json.dumps(list(was)))).fetchall()
        return [row["id"] for row in rows]

    def delete(self, ids: Iterable[str]) -> None:
        with self._translate_errors(), self._connection:
            self._connection.executemany("DELETE FROM novelties WHERE id = ?", [(id,) for id in ids])

    def close(self) -> None:
        with self._translate_errors():
            self._connection.close()

    # Details

    def _query(self, query: str, *values: object) -> list[sqlite3.Row]:
        with self._translate_errors():
            return self._connection.execute(query, values).fetchall()

    def _write_seen(self, statement: str, values: dict[str, Any]) -> None:
        with self._translate_errors(), self._connection:
            self._connection.execute(statement, values | {"seen": self._seen + 1})
        self._seen += 1

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise StoreError(f"{self._path}: {error}: {_remedy(error)}") from error


def _remedy(error: sqlite3.Error) -> str:
    # The low byte of a code is its family: SQLITE_BUSY_RECOVERY is a SQLITE_BUSY.
    match getattr(error, "sqlite_errorcode", 0) & 0xFF:
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            return "another process has this inbox open, give each server a data folder of its own"
        case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_NOTADB:
            return "the file is damaged, move it away: the images stay, their answers are lost"
        case _:
            return "check the data folder's space and rights"


def _answer_columns(sighting: Sighting) -> dict[str, Any]:
    """The columns that every sighting replaces. JSON has no NaN: such a value becomes that of a novel image."""
    score = sighting.score
    return {
        "version": sighting.version,
        "score": None if score is None or not math.isfinite(score) else float(score),
        "calibrated_score": _finite(sighting.calibrated_score, 0.0),
        "p_novel": _finite(sighting.p_novel, 1.0),
        "nearest": json.dumps([[name, _finite(share, 0.0)] for name, share in sighting.nearest]),
        "prediction_id": sighting.prediction_id,
        "client": sighting.client,
        "label": sighting.label,
    }


def _finite(value: float, otherwise: float) -> float:
    return float(value) if math.isfinite(value) else otherwise


def _novelty(row: sqlite3.Row) -> Novelty:
    values = dict(row)
    del values["seen"], values["hash"], values["embedding"], values["ran"]
    values["nearest"] = [(name, share) for name, share in json.loads(values["nearest"])]
    return Novelty(**values)


def _pack_embedding(embedding: NDArray[np.float32] | None) -> bytes | None:
    # Scaled to length 1, no number can overflow half precision.
    vector = None if embedding is None else unit_vector(embedding)
    return None if vector is None else vector.astype("<f2").tobytes()


def _unpack_embedding(blob: bytes | None) -> NDArray[np.float32] | None:
    return None if blob is None else unit_vector(np.frombuffer(blob, dtype="<f2"))
