"""The format of a data folder: the number in `<data>/FORMAT`.

A release that changes what a data folder holds raises `FORMAT` and adds a migration. A folder of a newer format is
refused; one of an older format is migrated when it is opened for writing. A folder without the file has format 1.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from models.errors import FormatError, StoreError
from models.files import file_lock, make_folder, write_durable

log = logging.getLogger(__name__)

FORMAT = 1
MARKER = "FORMAT"
# From each format n < FORMAT to the function that turns a folder of format n into one of format n + 1. A migration may
# be killed and run again: it must accept a folder that is migrated in part.
MIGRATIONS: dict[int, Callable[[Path], None]] = {}


def check_format(root: Path) -> None:
    """Raise FormatError unless this release can read the data folder. Call before reading."""
    found = _found(root) or 1
    if found < FORMAT:
        raise FormatError(
            f"the data folder {root} has format {found}, this openworld reads format {FORMAT}: "
            "start `openworld serve` or `openworld train` with write access to the folder to migrate it"
        )


def open_data_folder(root: Path) -> None:
    """Create the data folder if needed, migrate it to the present format and mark it. Call before writing.

    A folder of the present format that cannot be written is accepted: it can still be served.
    """
    found = _found(root)
    if found == FORMAT:
        return
    try:
        make_folder(root)
        with file_lock(root / ".lock"):
            # Another process may have migrated the folder while this one waited for the lock.
            for n in range(_found(root) or 1, FORMAT):
                log.info("migrating the data folder %s from format %d to %d", root, n, n + 1)
                MIGRATIONS[n](root)
                _mark(root, n + 1)
            if _found(root) is None:
                _mark(root, FORMAT)
    except OSError as error:
        if (found or 1) < FORMAT:
            raise StoreError(
                f"the data folder {root} cannot be migrated from format {found or 1} to {FORMAT}: {error}"
            ) from error
        log.info("the data folder %s is read-only: %s", root, error)


def _found(root: Path) -> int | None:
    """The format that the folder is marked with, if any; FormatError if it is newer or not a number."""
    path = root / MARKER
    try:
        text = path.read_text("ascii", errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise FormatError(f"{path} cannot be read: {error.strerror}") from error
    if not (text.isdecimal() and 1 <= len(text) <= 9 and int(text) >= 1):
        raise FormatError(f"{path} holds {text[:40]!r}, not a format number: restore it from a backup of the folder")
    if int(text) > FORMAT:
        raise FormatError(
            f"the data folder {root} has format {text}, newer than {FORMAT}, the newest that this openworld supports: "
            "upgrade openworld, or use another data folder"
        )
    return int(text)


def _mark(root: Path, number: int) -> None:
    write_durable(root / MARKER, f"{number}\n".encode())
