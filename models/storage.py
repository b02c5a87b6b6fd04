"""Storage of a data folder: keys are relative paths with `/`, values are bytes.

Versions and images stand on this interface, which a file system and an object store can both implement. Most values
never change: `put_if_absent`. The few that do, such as the number of the current version, are replaced by
`compare_and_set`. **Every write is complete or absent, and survives a power cut when the call returns.**
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from models.files import TEMPORARY, create_durable, file_lock, fsync_folder, make_folder, write_durable


class Stored(NamedTuple):
    """A value in the storage, without its bytes."""

    key: str
    size: int
    time: float  # of the last write, in seconds since the epoch


class Storage(Protocol):
    """Errors are OSError; FileNotFoundError for a key that does not exist."""

    def get(self, key: str) -> bytes: ...

    def find(self, key: str) -> Stored | None:
        """Size and time of a value; None if the key does not exist."""

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Store a value under a new key. False, and nothing is written, if the key exists."""

    def compare_and_set(self, key: str, expected: bytes | None, data: bytes) -> bool:
        """Replace `expected` (None: the key does not exist) by `data`. False, and nothing is written, if it differs.

        Replacing a value by itself renews its time.
        """

    def list(self, prefix: str) -> Iterator[Stored]:
        """The values whose keys begin with `prefix`, in no order."""

    def delete(self, keys: Iterable[str]) -> None:
        """Delete values; keys that do not exist are ignored."""


class LocalFiles:
    """A `Storage` in a folder, one file per key. Names that begin with a dot are temporary files and locks."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, key: str) -> Path:
        """The file of a key, for libraries that read files themselves."""
        return self.root / key

    def get(self, key: str) -> bytes:
        return self.path(key).read_bytes()

    def find(self, key: str) -> Stored | None:
        try:
            stat = self.path(key).stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return Stored(key, stat.st_size, stat.st_mtime)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        path = self.path(key)
        make_folder(path.parent)
        if create_durable(path, data):
            return True
        fsync_folder(path.parent)  # another process may have created the file and not synced the folder yet
        return False

    def compare_and_set(self, key: str, expected: bytes | None, data: bytes) -> bool:
        path = self.path(key)
        make_folder(path.parent)
        if expected == data == self._read(path):
            os.utime(path)  # needs no space
            return True
        with file_lock(self.root / ".storage.lock"):
            if self._read(path) != expected:
                return False
            write_durable(path, data)
            return True

    def _read(self, path: Path) -> bytes | None:
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return None

    def list(self, prefix: str) -> Iterator[Stored]:
        folder = prefix.rpartition("/")[0]
        for place, names, file_names in os.walk(self.root / folder):
            names[:] = [name for name in names if not name.startswith(".")]
            parent = Path(place).relative_to(self.root).as_posix()
            for name in file_names:
                key = name if parent == "." else f"{parent}/{name}"
                if not name.startswith(".") and key.startswith(prefix) and (found := self.find(key)) is not None:
                    yield found

    def delete(self, keys: Iterable[str]) -> None:
        folders = set()
        for key in keys:
            path = self.path(key)
            try:
                path.unlink()
            except (FileNotFoundError, NotADirectoryError):
                continue
            folders.add(path.parent)
        for folder in folders:
            # The folder stays: another process may be about to put a value into it.
            fsync_folder(folder)

    def temporaries(self, prefixes: Iterable[str]) -> Iterator[Path]:
        """Temporary files and folders, for a caller that knows that no process writes under these prefixes."""
        for prefix in prefixes:
            folder, _, name = prefix.rpartition("/")
            yield from (self.root / folder).glob(f".{name}*{TEMPORARY}")
