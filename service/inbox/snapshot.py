"""A consistent copy of the inbox's database, taken while a server has it open.

The server holds the file exclusively, so SQLite refuses other readers; this module copies the files instead. SQLite
changes the database file only by copying pages of the write-ahead log into it. A log that is read after the database
has all these pages, unless it was started again in between, which changes its header: then the copy is repeated. The
last change may be missing from the copy, or be incomplete, which SQLite recognises by its checksums.
"""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from models.errors import StoreError

ATTEMPTS = 50
_HEADER = 32  # bytes; has two random salts, which change when the log starts again


def copy_database(database: Path, target: Path) -> None:
    """Write a consistent copy of `database` to `target`, a file that does not exist, as one file without a log."""
    with tempfile.TemporaryDirectory(prefix="openworld-") as folder:
        copy = Path(folder) / "copy.sqlite3"
        for _ in range(ATTEMPTS):
            before = _log_of(database)[:_HEADER]
            data = database.read_bytes()
            log = _log_of(database)
            if log[:_HEADER] == before:
                break
        else:
            raise StoreError(f"{database} is written too fast to be copied: try again when there is less load")
        copy.write_bytes(data)
        _log_path(copy).write_bytes(log)
        try:
            with closing(sqlite3.connect(copy)) as connection:
                connection.execute("VACUUM INTO ?", (str(target),))
        except sqlite3.Error as error:
            raise StoreError(f"{database} cannot be read: {error}") from error


@contextmanager
def read_snapshot(database: Path) -> Iterator[sqlite3.Connection]:
    """A connection to a consistent copy of `database`, in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="openworld-") as folder:
        copy = Path(folder) / "inbox.sqlite3"
        copy_database(database, copy)
        with closing(sqlite3.connect(copy)) as connection:
            yield connection


def novelty_sizes(connection: sqlite3.Connection) -> dict[str, int]:
    """Novelty -> bytes of its image; none if the copy was taken while the database was being created."""
    if connection.execute("PRAGMA user_version").fetchone()[0] == 0:
        return {}
    return dict(tuple(row) for row in connection.execute("SELECT id, bytes FROM novelties"))


def _log_of(database: Path) -> bytes:
    try:
        return _log_path(database).read_bytes()
    except FileNotFoundError:
        return b""


def _log_path(database: Path) -> Path:
    return database.with_name(f"{database.name}-wal")
