"""The format of a data folder: the number in its value `FORMAT`.

A release that changes what a data folder holds raises `FORMAT` and adds a migration. A folder of a newer format is
refused; one of an older format is migrated when it is opened for writing, after a backup to `<data>/format-<n>/`. A
folder with a current version and without the file has format 1. An object store is not migrated in place: servers of
two releases may use it at the same time.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from models.errors import FormatError, StoreError
from models.files import NO_LINKS, file_lock, fsync_folder, make_folder, remove, temporary_beside, write_durable
from models.storage import DataFolder, Storage, storage_of
from models.versions.format_2 import from_2_to_3

log = logging.getLogger(__name__)

FORMAT = 3
MARKER = "FORMAT"
# What versions of format 1 consist of. `CURRENT` is moved last: without a marker it tells that versions remain.
FORMAT_1_FILES = (
    *("promotions.jsonl", "versions", "rejected", "graphs", "backbone.json", "backbone.safetensors"),
    "CURRENT",
)


def _from_1_to_2(root: Path) -> None:
    """Move the versions to `<data>/format-1/`; images, inbox and tasks stay.

    Format 2 has other statistics of the frozen feature. They follow from features of all learned images, which are not
    stored, so a version of format 1 cannot be converted.
    """
    archive = root / "format-1"
    present = [name for name in FORMAT_1_FILES if (root / name).exists()]
    if not present:
        return
    make_folder(archive)
    for name in present:
        (root / name).rename(archive / name)
    fsync_folder(archive)
    fsync_folder(root)
    log.warning(
        "the versions in %s were made by an earlier release and cannot be used by this one: they are kept in %s, "
        "nothing is learned now, and their classes must be taught again",
        root,
        archive,
    )


# From each format n < FORMAT to the function that turns a folder of format n into one of format n + 1. A migration may
# be killed and run again: it must accept a folder that is migrated in part.
MIGRATIONS: dict[int, Callable[[Path], None]] = {1: _from_1_to_2, 2: from_2_to_3}
MOVED_TO_BACKUP = frozenset({1})  # formats whose migration moves the files to the place of the backup
# Not in a backup: images and their features never change, and what is erased must not remain in it; cached features are
# computed again, and the others have formats of their own.
NOT_MIGRATED = frozenset({"images", "features", "cache", "inbox", "redis", "work"})


def check_format(folder: DataFolder) -> None:
    """Raise FormatError unless this release can read the data folder. Call before reading."""
    storage = storage_of(folder)
    found = _found(storage)
    if found is not None and found < FORMAT:
        remedy = "start `openworld serve` or `openworld train` with write access to the folder to migrate it"
        if storage.shared:
            remedy = "copy it to a folder with `openworld migrate`, start this openworld there once, and copy it back"
        place = storage.location("")
        raise FormatError(f"the data folder {place} has format {found}, this openworld reads format {FORMAT}: {remedy}")


def open_data_folder(folder: DataFolder) -> None:
    """Create the data folder if needed, migrate it to the present format and mark it. Call before writing.

    A folder of the present format that cannot be written is accepted: it can still be served.
    """
    storage = storage_of(folder)
    found, root = _found(storage), storage.root
    if found == FORMAT:
        return
    if storage.shared:
        check_format(storage)
        storage.put_if_absent(MARKER, f"{FORMAT}\n".encode())
        return
    try:
        make_folder(root)
        with file_lock(root / ".lock"):
            # Another process may have migrated the folder while this one waited for the lock.
            for n in range(_found(storage) or FORMAT, FORMAT):
                log.info("migrating the data folder %s from format %d to %d", root, n, n + 1)
                if n not in MOVED_TO_BACKUP:
                    _back_up(root, n)
                MIGRATIONS[n](root)
                _mark(root, n + 1)
            _mark(root, FORMAT)
    except OSError as error:
        if found is not None and found < FORMAT:
            raise StoreError(
                f"the data folder {root} cannot be migrated from format {found} to {FORMAT}: {error}"
            ) from error
        log.info("the data folder %s is read-only: %s", root, error)


def _back_up(root: Path, n: int) -> None:
    """Keep the files of format `n` in `<data>/format-<n>/`, as hard links where the file system has them.

    A migration must therefore replace files, never change them in place. To go back, stop all programs, and move the
    content of the folder back.
    """
    target = root / f"format-{n}"
    if target.exists():  # complete: an earlier attempt at the migration was killed after its backup
        return
    paths = [p for p in root.iterdir() if not p.name.startswith((".", "format-")) and p.name not in NOT_MIGRATED]
    if {path.name for path in paths} <= {MARKER}:
        return
    temporary = temporary_beside(target)
    try:
        temporary.mkdir()
        for path in paths:
            if path.is_dir():
                shutil.copytree(path, temporary / path.name, copy_function=_link)
            else:
                _link(path, temporary / path.name)
        os.sync()
        temporary.rename(target)
    except BaseException:
        remove(temporary)
        raise
    fsync_folder(root)


def _link(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        shutil.copy2(source, target)


def _found(storage: Storage) -> int | None:
    """The format of the folder, None if it is new; FormatError if it is newer than this release or not a number."""
    path = storage.location(MARKER)
    try:
        text = storage.get(MARKER).decode("ascii", errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        if storage.find("CURRENT") is None:
            return None
        # Another process may have marked the new folder, and published, since the marker was looked for.
        return _found(storage) if storage.find(MARKER) else 1
    except OSError as error:
        raise FormatError(f"{path} cannot be read: {error.strerror}") from error
    if not (text.isdecimal() and 1 <= len(text) <= 9 and int(text) >= 1):
        raise FormatError(f"{path} holds {text[:40]!r}, not a format number: restore it from a backup of the folder")
    if int(text) > FORMAT:
        raise FormatError(
            f"the data folder {storage.location('')} has format {text}, newer than {FORMAT}, "
            "the newest that this openworld supports: upgrade openworld, or use another data folder"
        )
    return int(text)


def _mark(root: Path, number: int) -> None:
    write_durable(root / MARKER, f"{number}\n".encode())
