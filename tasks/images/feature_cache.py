"""The feature cache: what the backbone and the networks of finished tasks compute for a stored image.

    <root>/cache/<backbone>/ab/<sha256>    one file per image, of records that are appended

Neither the backbone nor a finished task ever changes, so a record holds for good. **A record that is read is whole and
unchanged: everything else counts as missing and is computed again.** Files are never shortened or changed in place, so
a process may map one while another appends to it or removes it. Nothing here is durable or in a backup: after a power
cut, checksums tell what was written.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
import os
import shutil
import struct
import zlib
from collections.abc import Collection, Container, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from models.errors import StoreError
from models.files import fsync_folder

log = logging.getLogger(__name__)

FOLDER = "cache"
FREE_BYTES = 512 * 2**20  # of the disk, which are left to versions and images
KEPT_SHARE = 0.95  # of the limit, after removing images: the next ones need no search
Record = NDArray[np.float32]  # (rows, columns)

_HEADER = struct.Struct("<4sI32sQII")  # mark, checksum of the rest, hash of the kind, bytes, columns, 0
_MARK = b"OWF1"


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
        self._writing = max_bytes > 0
        self._bytes = sum(file.bytes for file in cache_files(root))
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
        return self._entries[sha256].get(_digest(kind))

    def put(self, kind: str, records: Mapping[str, Record]) -> None:
        """Add a record of one kind to each of these images, if there is room."""
        size = sum(_HEADER.size + record.nbytes for record in records.values())
        try:
            if not self._writing or not self._make_room(size):
                return
            for sha256, record in records.items():
                if self.get(sha256, kind) is None and sha256 in self._images:
                    self._append(sha256, kind, np.ascontiguousarray(record, np.float32))
        except OSError as error:
            self._stop(str(error))

    def _append(self, sha256: str, kind: str, record: Record) -> None:
        path, data = self._path(sha256), _packed(kind, record)
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
        self._entries[sha256][_digest(kind)] = record

    def _open(self, path: Path) -> dict[bytes, Record]:
        """The records of a file. A damaged one is removed, so that nothing is appended behind the damage."""
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                # Private: torch wants memory that may be written.
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) if size else b""
            records, end = _unpacked(data)
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


def _digest(kind: str) -> bytes:
    return hashlib.sha256(kind.encode()).digest()


def _packed(kind: str, record: Record) -> bytes:
    payload = record.tobytes()
    header = _HEADER.pack(_MARK, 0, _digest(kind), len(payload), record.shape[-1], 0)
    return _MARK + struct.pack("<I", zlib.crc32(payload, zlib.crc32(header[8:]))) + header[8:] + payload


def _unpacked(data: mmap.mmap | bytes) -> tuple[dict[bytes, Record], int]:
    """(the records up to the first damaged or incomplete one, the end of the last of them)"""
    view, records, end = memoryview(data), {}, 0
    while end + _HEADER.size <= len(view):
        mark, checksum, digest, size, columns, _ = _HEADER.unpack_from(view, end)
        start = end + _HEADER.size
        if mark != _MARK or columns == 0 or size % (4 * columns) or start + size > len(view):
            break
        payload = view[start : start + size]
        if zlib.crc32(payload, zlib.crc32(view[end + 8 : start])) != checksum:
            break
        records[digest] = np.frombuffer(payload, np.float32).reshape(-1, columns)
        end = start + size
    return records, end
