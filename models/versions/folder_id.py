"""The id of a data folder: random, made once, in its value `ID`. It keeps folders apart that share a Redis server."""

from __future__ import annotations

import re
import secrets
from contextlib import suppress

from models.errors import StoreError
from models.storage import DataFolder, Storage, storage_of
from models.versions.data_format import open_data_folder

MARKER = "ID"


def recorded_id(folder: DataFolder) -> str | None:
    """The id of the data folder; None if it has none yet. Writes nothing."""
    with suppress(FileNotFoundError, NotADirectoryError):
        return _read(storage_of(folder))
    return None


def folder_id(folder: DataFolder) -> str:
    """The id of the data folder; both are created if needed. StoreError if they cannot be."""
    storage = storage_of(folder)
    if (found := recorded_id(storage)) is not None:
        return found
    try:
        open_data_folder(storage)
        with storage.locked(".lock"):  # for a file system without hard links, where two processes could both succeed
            storage.put_if_absent(MARKER, f"{secrets.token_hex(8)}\n".encode())
    except OSError as error:
        raise StoreError(
            f"the data folder {storage.location('')} has no id, which the task queue needs, and it cannot be written "
            f"({error}): check the path and its rights"
        ) from error
    return _read(storage)


def _read(storage: Storage) -> str:
    text = storage.get(MARKER).decode("ascii", errors="replace").strip()
    if not re.fullmatch(r"[0-9a-f]{16}", text):
        raise StoreError(
            f"{storage.location(MARKER)} holds {text[:40]!r}, not an id of 16 hex digits: restore it from a backup of "
            "the folder, or delete it and submit the queued tasks again"
        )
    return text
