"""The image store: encoded images on disk, named by their sha256. Tasks and versions refer to images by this key.

When `put` returns, the image survives a power cut. `read` never returns bytes other than those that were put.
"""

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from models.errors import StoreError
from models.files import fsync_folder, make_folder, sha256_bytes, sha256_file, write_durable

_SHA256 = re.compile(r"[0-9a-f]{64}")  # only such a key may become part of a path


class StoredImage(NamedTuple):
    """A file of the image store."""

    sha256: str
    bytes: int
    time: float  # when it was last put


class ImageStore:
    """Images under `<root>/images/ab/<sha256>`."""

    def __init__(self, root: Path) -> None:
        self._folder = root / "images"

    def __repr__(self) -> str:
        return f"ImageStore({str(self._folder.parent)!r})"

    def put(self, data: bytes) -> str:
        """Store an image and return its sha256. A second call repairs a damaged file and renews its time."""
        sha = sha256_bytes(data)
        path = self._path(sha)
        try:
            if path.is_file() and sha256_file(path) == sha:
                with suppress(PermissionError):  # the file of another user; it keeps its age
                    os.utime(path)
                fsync_folder(path.parent)  # another process may have renamed the file and not synced the folder yet
            else:
                make_folder(path.parent)
                write_durable(path, data)
        except OSError as error:
            raise StoreError(
                f"image {sha} cannot be stored ({error}): check the space and the rights of the data folder"
            ) from error
        return sha

    def read(self, sha: str) -> bytes:
        """Return the verified bytes of an image; `StoreError` when they are missing or have changed."""
        try:
            data = self._path(sha).read_bytes()
        except FileNotFoundError as error:
            raise StoreError(f"image {sha} is not in the store: submit it again") from error
        except OSError as error:
            raise StoreError(f"image {sha} cannot be read ({error}): check the data folder") from error
        if sha256_bytes(data) != sha:
            raise StoreError(f"image {sha} is corrupt, its bytes have changed: submit it again to repair the file")
        return data

    def find(self, sha: str) -> StoredImage | None:
        """Return size and time of an image; None when it is not stored."""
        try:
            stat = self._path(sha).stat()
        except OSError:
            return None
        return StoredImage(sha, stat.st_size, stat.st_mtime)

    def __contains__(self, sha: object) -> bool:
        return isinstance(sha, str) and _SHA256.fullmatch(sha) is not None and self._path(sha).is_file()

    def __iter__(self) -> Iterator[StoredImage]:
        for path in self._folder.glob("??/*"):
            if _SHA256.fullmatch(path.name) and (image := self.find(path.name)) is not None:
                yield image

    def remove(self, sha: str) -> None:
        """Delete an image that nothing refers to. Idempotent, so that a repeated clean-up can finish."""
        path = self._path(sha)
        self._unlink(path)
        with suppress(OSError):  # the folder is not empty, or not there
            path.parent.rmdir()

    def erase(self, images: Iterable[StoredImage]) -> list[StoredImage]:
        """Delete images durably: a power cut cannot bring them back. Returns those deleted."""
        erased = []
        for image in images:
            self._unlink(self._path(image.sha256))
            erased.append(image)
        # The folders stay: another process may be about to put an image into one.
        for folder in {self._path(image.sha256).parent for image in erased}:
            with suppress(FileNotFoundError):
                fsync_folder(folder)
        return erased

    def _unlink(self, path: Path) -> None:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(
                f"image {path.name} cannot be removed ({error}): check the rights of the data folder"
            ) from error

    def _path(self, sha: str) -> Path:
        if not _SHA256.fullmatch(sha):
            raise StoreError(f"{sha[:80]!r} is not the sha256 of an image: expected 64 lower-case hex digits")
        return self._folder / sha[:2] / sha
