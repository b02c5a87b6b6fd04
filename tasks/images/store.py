"""Images by their sha256: the queue carries references, this folder carries the bytes.

An image that `put` has returned for survives a power cut, and `read` never hands out other bytes than were put.
"""

import os
import re
from contextlib import suppress
from pathlib import Path

from models.errors import StoreError
from models.files import fsync_folder, make_folder, sha256_bytes, sha256_file, write_durable

# Also the guard against a reference that is a path: only this may become part of a file name.
_SHA256 = re.compile(r"[0-9a-f]{64}")


class ImageStore:
    """Images under `<root>/images/ab/<sha256>`."""

    def __init__(self, root: Path) -> None:
        self._folder = root / "images"

    def __repr__(self) -> str:
        return f"ImageStore({str(self._folder.parent)!r})"

    def put(self, data: bytes) -> str:
        """Store the bytes and return their sha256; a second time changes nothing, and mends a damaged file."""
        sha = sha256_bytes(data)
        path = self._path(sha)
        try:
            if _holds(path, sha):
                # Its age counts from here: what was just brought again must not be removed as old.
                with suppress(PermissionError):  # another user's file; it is there all the same
                    os.utime(path)
                # Another process may have renamed it into place a moment ago and not yet synced the folder.
                fsync_folder(path.parent)
            else:
                make_folder(path.parent)
                write_durable(path, data)
        except OSError as error:
            raise StoreError(
                f"image {sha} cannot be stored ({error}): check the data folder's space, rights"
            ) from error
        return sha

    def read(self, sha: str) -> bytes:
        """The bytes of an image, verified; `StoreError` when they are missing or changed."""
        try:
            data = self._path(sha).read_bytes()
        except FileNotFoundError as error:
            raise StoreError(f"image {sha} is not in the store: submit it again") from error
        except OSError as error:
            raise StoreError(f"image {sha} cannot be read ({error}): check the data folder") from error
        if sha256_bytes(data) != sha:
            raise StoreError(f"image {sha} is corrupt, its bytes have changed: submit it again, which mends the file")
        return data

    def __contains__(self, sha: object) -> bool:
        return isinstance(sha, str) and _SHA256.fullmatch(sha) is not None and self._path(sha).is_file()

    def remove(self, sha: str) -> None:
        """Forget an image; one that is not there is no error, so that a repeated clean-up can finish."""
        try:
            path = self._path(sha)
            path.unlink(missing_ok=True)
            with suppress(OSError):  # not empty, or not there
                path.parent.rmdir()
        except OSError as error:
            raise StoreError(f"image {sha} cannot be removed ({error}): check the data folder's rights") from error

    def _path(self, sha: str) -> Path:
        if not _SHA256.fullmatch(sha):
            raise StoreError(f"{sha[:80]!r} is not the sha256 of an image: expected 64 lower-case hex digits")
        return self._folder / sha[:2] / sha


def _holds(path: Path, sha: str) -> bool:
    return path.is_file() and sha256_file(path) == sha
