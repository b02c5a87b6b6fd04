"""The feature cache: what the backbone and the networks of finished tasks compute for a stored image.

    <root>/cache/<backbone>/ab/<sha256>    one file per image, of records that are appended

Neither the backbone nor a finished task ever changes, so a record holds for good. **A record that is read is whole and
unchanged: everything else counts as missing and is computed again.** Files are never shortened or changed in place, so
a process may map one while another appends to it or removes it. Nothing here is durable or in a backup: after a power
cut, checksums tell what was written.
"""

from __future__ import annotations

import logging
import mmap
import os
import shutil
from collections.abc import Collection, Container, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from models.errors import StoreError
from models.files import fsync_folder
from tasks.images.feature_records import HEADER_BYTES, Record, digest_of, packed, unpacked

log = logging.getLogger(__name__)

FOLDER = "cache"
FREE_BYTES = 512 * 2**20  # of the disk, which are left to versions and images
READ_BYTES = 64 * 2**10  # a smaller file is read, a larger one mapped
KEPT_SHARE = 0.95  # of the limit, after removing images: the next ones need no search


class CacheFile(NamedTuple):
    """The entries of one image."""

    path: Path
    bytes: int
    used: float  # seconds since the epoch

    @property
    def sha256(self) -> str:
        return self.path.name


class FeatureCache:
    """Features by image and kind, for one backbone, with at most `max_bytes` on the disk.

    The images that were used the longest ago make room for others, but those in use by this object stay. An image that
    `images` does not contain gets no entry. Errors of the disk end the writing, with a warning, and nothing else.
    """

    def __init__(self, root: Path, backbone_sha256: str, images: Container[str], max_bytes: int) -> None:
        self._root, self._folder = root, root / FOLDER / backbone_sha256[:16]
        self._images, self._max_bytes = images, max_bytes
        self._entries: dict[str, dict[bytes, Record]] = {}  # of images in use
        self._start()

    def _start(self) -> None:
        """Look at what the disk holds, and write as far as there is room."""
        self._writing = self._max_bytes > 0
        self._bytes = sum(file.bytes for file in cache_files(self._root))
        try:
            if self._writing:
                self._folder.mkdir(parents=True, exist_ok=True)
            self._make_room(0)
        except OSError as error:
            self._stop(str(error))

    def get(self, sha256: str, kind: str) -> Record | None:
        """A record of an image, mapped; None if there is none."""
        if sha256 not in self._entries:
            self._entries[sha256] = self._open(self._path(sha256))
        return self._entries[sha256].get(digest_of(kind))

    def put(self, kind: str, records: Mapping[str, Record]) -> None:
        """Add a record of one kind to each of these images, if there is room."""
        size = sum(HEADER_BYTES + record.nbytes for record in records.values())
        try:
            if not self._writing or not self._make_room(size):
                return
            for sha256, record in records.items():
                if self.get(sha256, kind) is None and sha256 in self._images:
                    self._append(sha256, kind, np.ascontiguousarray(record, np.float32))
        except OSError as error:
            self._stop(str(error))

    def keep_only(self, sha256s: Collection[str]) -> None:
        """Before another task: forget all other images, which are no longer in use, and look again at a full disk."""
        kept = sha256s if self._writing else ()  # files are read again after a failure: one may end with a part
        self._entries = {sha256: records for sha256, records in self._entries.items() if sha256 in kept}
        if not self._writing or self._bytes > self._max_bytes / 2:
            self._start()

    def _append(self, sha256: str, kind: str, record: Record) -> None:
        path, data = self._path(sha256), packed(kind, record)
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            written = os.write(descriptor, data)
        finally:
            os.close(descriptor)
        self._bytes += written
        if written < len(data):  # the reader ignores the part; the rest would follow it
            raise OSError("the disk took a part of a record")
        # An erasure removes the image and then its entries: either it removes this one, or the image is gone by now.
        if sha256 not in self._images:
            path.unlink(missing_ok=True)
        self._entries[sha256][digest_of(kind)] = record

    def _open(self, path: Path) -> dict[bytes, Record]:
        """The records of a file. A damaged one is removed, so that nothing is appended behind the damage."""
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                # A mapping keeps a file descriptor, and processes may have 1024 of them: small files are read.
                # Private: torch requires writable memory.
                mapped = size > READ_BYTES
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) if mapped else bytearray(file.read())
            records, end = unpacked(data)
            if end < size or size == 0:
                path.unlink(missing_ok=True)
                self._bytes -= size
            else:
                os.utime(path)
            return records
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            self._stop(str(error))
            return {}

    def _make_room(self, size: int) -> bool:
        """Whether a number of bytes fits, after removing the images that were used the longest ago."""
        if self._bytes + size > self._max_bytes:
            enough = KEPT_SHARE * self._max_bytes - size
            for file in sorted(cache_files(self._root), key=lambda file: file.used):
                if file.sha256 in self._entries:
                    continue
                with suppress(OSError):
                    file.path.unlink(missing_ok=True)
                    self._bytes -= file.bytes
                if self._bytes <= enough:
                    break
        if self._bytes + size > self._max_bytes:
            self._writing = False  # all of it is in use: later entries would not fit either
            return False
        if size and shutil.disk_usage(self._folder).free < FREE_BYTES + size:
            self._stop("the disk is almost full")
        return self._writing

    def _stop(self, reason: str) -> None:
        if self._writing:
            log.warning("the feature cache %s is no longer written: %s", self._root / FOLDER, reason)
        self._writing = False

    def _path(self, sha256: str) -> Path:
        return self._folder / sha256[:2] / sha256


def cache_files(root: Path) -> Iterator[CacheFile]:
    """The files of a data folder's cache, of all backbones."""
    for path in (root / FOLDER).glob("*/??/*"):
        with suppress(OSError):
            stat = path.stat()
            yield CacheFile(path, stat.st_size, stat.st_mtime)


def erase_cached(root: Path, sha256s: Collection[str]) -> int:
    """Remove all entries of images durably; returns the number of files. Call it after the images are removed."""
    changed, removed = set(), 0
    for folder in (root / FOLDER).glob("*"):
        for sha256 in sha256s:
            path = folder / sha256[:2] / sha256
            try:
                path.unlink()
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                raise StoreError(f"{path} cannot be removed ({error}): check the rights of the data folder") from error
            removed += 1
            changed.add(path.parent)
    for parent in changed:
        with suppress(FileNotFoundError):
            fsync_folder(parent)
    return removed
