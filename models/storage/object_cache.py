"""Copies of objects that never change, in the data folder: `<data>/objects/<key>`.

The name of such an object contains its sha256. **A copy is used only if its bytes have this hash**; everything else
counts as missing. At most `max_bytes` are kept, and those that were used the longest ago make room for others. Nothing
here is durable: the folder can be deleted at any time.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from models.files import sha256_bytes, sha256_file, temporary_beside

log = logging.getLogger(__name__)

FOLDER = "objects"
KEPT_SHARE = 0.9  # of the limit, after copies were removed: the next ones need no search
_HASH = re.compile(r"(?:^|/)([0-9a-f]{64})(?:\.[a-z.]+)?$")


def content_hash(key: str) -> str | None:
    """The sha256 in the name of an object that never changes; None for other keys."""
    found = _HASH.search(key)
    return found.group(1) if found else None


class ObjectCache:
    """Thread-safe. Several processes may share the folder. Errors of the disk only make reading slower."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder, self._max_bytes = folder, max_bytes
        self._lock = threading.Lock()
        self._bytes = sum(size for _, size, _ in self._files())

    def path(self, key: str) -> Path:
        return self._folder / key

    def get(self, key: str, sha256: str) -> bytes | None:
        """The verified copy; None if there is none. A damaged one is removed."""
        path = self.path(key)
        try:
            data = path.read_bytes()
        except OSError:
            return None
        if sha256_bytes(data) != sha256:
            self.remove([key])
            return None
        with suppress(OSError):
            os.utime(path)
        return data

    def file(self, key: str, sha256: str, fetch: Callable[[], bytes]) -> Path:
        """A file with the object, fetched if there is no verified copy. OSError if it cannot be written."""
        path = self.path(key)
        with suppress(OSError):
            if sha256_file(path) == sha256:
                os.utime(path)
                return path
        self._write(path, fetch())
        return path

    def put(self, key: str, data: bytes) -> None:
        """Keep a copy of an object that the caller has verified, if there is room."""
        if len(data) > self._max_bytes * (1 - KEPT_SHARE):
            return  # would push out too much
        try:
            self._write(self.path(key), data)
        except OSError as error:
            log.warning("no local copy of %s can be kept: %s", key, error)

    def remove(self, keys: Iterable[str]) -> None:
        for key in keys:
            with suppress(OSError):
                size = self.path(key).stat().st_size
                self.path(key).unlink()
                with self._lock:
                    self._bytes -= size

    def _write(self, path: Path, data: bytes) -> None:
        with self._lock:
            if self._bytes + len(data) > self._max_bytes:
                self._make_room(len(data))
            self._bytes += len(data)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = temporary_beside(path)
        try:
            temporary.write_bytes(data)
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise

    def _make_room(self, size: int) -> None:
        files = sorted(self._files(), key=lambda file: file[2])
        self._bytes = sum(file[1] for file in files)  # other processes write to the folder as well
        for path, own, _ in files:
            if self._bytes + size <= self._max_bytes * KEPT_SHARE:
                break
            with suppress(OSError):
                path.unlink()
                self._bytes -= own

    def _files(self) -> list[tuple[Path, int, float]]:
        """Path, size and time of the last use of each copy; temporary files of killed processes are among them."""
        found = []
        for place, _, names in os.walk(self._folder):
            for name in names:
                path = Path(place) / name
                with suppress(OSError):  # removed since it was listed
                    stat = path.stat()
                    found.append((path, stat.st_size, stat.st_mtime))
        return found
