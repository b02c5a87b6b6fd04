"""The id of a data folder: random, made once, in `<data>/ID`. It keeps folders apart that share a Redis server."""

from __future__ import annotations

import re
import secrets
from contextlib import suppress
from pathlib import Path

from models.errors import StoreError
from models.files import file_lock, write_durable
from models.versions.data_format import open_data_folder

MARKER = "ID"


def recorded_id(root: Path) -> str | None:
    """The id of the data folder; None if it has none yet. Writes nothing."""
    with suppress(FileNotFoundError, NotADirectoryError):
        return _read(root / MARKER)
    return None


def folder_id(root: Path) -> str:
    """The id of the data folder; both are created if needed. StoreError if they cannot be."""
    if (found := recorded_id(root)) is not None:
        return found
    path = root / MARKER
    try:
        open_data_folder(root)
        with file_lock(root / ".lock"):
            if not path.exists():  # another process may have waited for the lock less long
                write_durable(path, f"{secrets.token_hex(8)}\n".encode())
    except OSError as error:
        raise StoreError(
            f"the data folder {root} has no id, which the task queue needs, and it cannot be written ({error}): "
            "check the path and its rights"
        ) from error
    return _read(path)


def _read(path: Path) -> str:
    text = path.read_text("ascii", errors="replace").strip()
    if not re.fullmatch(r"[0-9a-f]{16}", text):
        raise StoreError(
            f"{path} holds {text[:40]!r}, not an id of 16 hex digits: restore it from a backup of the folder, "
            "or delete it and submit the queued tasks again"
        )
    return text
