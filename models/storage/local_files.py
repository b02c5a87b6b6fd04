"""The storage in a folder, one file per key."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from models.files import TEMPORARY, create_durable, file_lock, fsync_folder, make_folder, write_durable
from models.storage.interface import Observer, Stored


@dataclass(frozen=True)
class LocalFiles:
    """A `Storage` in a folder. Names that begin with a dot are temporary files and locks."""

    root: Path
    shared = False

    def local_path(self, key: str) -> Path:
        return self.root / key

    def location(self, key: str) -> str:
        return str(self.local_path(key))

    def get(self, key: str) -> bytes:
        return self.local_path(key).read_bytes()

    def find(self, key: str) -> Stored | None:
        try:
            stat = self.local_path(key).stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return Stored(key, stat.st_size, stat.st_mtime)

    def prefetch(self, keys: Iterable[str]) -> None:
        """A disk is fast enough."""

    def put(self, key: str, data: bytes) -> None:
        path = self.local_path(key)
        make_folder(path.parent)
        write_durable(path, data)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        path = self.local_path(key)
        make_folder(path.parent)
        if create_durable(path, data):
            return True
        fsync_folder(path.parent)  # another process may have created the file and not synced the folder yet
        return False

    def compare_and_set(self, key: str, expected: bytes | None, data: bytes) -> bool:
        path = self.local_path(key)
        make_folder(path.parent)
        if expected == data == self._read(path):
            _renew(path)  # needs no space
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
        for key, entry in _files(self.root / folder, f"{folder}/" if folder else ""):
            if key.startswith(prefix):
                try:
                    stat = entry.stat()
                except FileNotFoundError:
                    continue
                yield Stored(key, stat.st_size, stat.st_mtime)

    def delete(self, keys: Iterable[str]) -> None:
        folders = set()
        for key in keys:
            path = self.local_path(key)
            try:
                path.unlink()
            except (FileNotFoundError, NotADirectoryError):
                continue
            folders.add(path.parent)
        for folder in folders:
            # The folder stays: another process may be about to put a value into it.
            fsync_folder(folder)

    def locked(self, name: str) -> AbstractContextManager[object]:
        return file_lock(self.root / name)

    def temporaries(self, prefixes: Iterable[str]) -> Iterator[Path]:
        for prefix in prefixes:
            folder, _, name = prefix.rpartition("/")
            yield from (self.root / folder).glob(f".{name}*{TEMPORARY}")

    def observe(self, observer: Observer) -> None:
        """Files need no requests."""

    def drop_copies(self, keys: Iterable[str]) -> None:
        """There are no copies."""


def _files(folder: Path | str, prefix: str) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """All files under a folder, by keys with this prefix, without those that begin with a dot."""
    try:
        with os.scandir(folder) as found:
            entries = [entry for entry in found if not entry.name.startswith(".")]
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from _files(entry.path, f"{prefix}{entry.name}/")
        elif not entry.is_dir():
            yield f"{prefix}{entry.name}", entry


def _renew(path: Path) -> None:
    """Set the time of a file to now, by the clock that times are compared with: the kernel's is some ms behind it."""
    now = time.time_ns()
    try:
        os.utime(path, ns=(now, now))
    except PermissionError:  # of another user: with the right to write, only the kernel's time can be set
        os.utime(path)
