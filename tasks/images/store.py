"""The image store: encoded images, named by their sha256. Tasks and versions refer to images by this key.

When `put` returns, the image survives a power cut. `read` never returns bytes other than those that were put.
"""

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import NamedTuple, TypeVar

from models.errors import StoreError
from models.files import sha256_bytes
from models.storage import DataFolder, Storage, storage_of

NOVELTIES = "novelties/"  # prefix of the images of the inbox that servers share; its rows are in Redis
PARALLEL_REQUESTS = 16  # to an object store
LISTED_FROM = 100  # images that are looked for at a time
_SHA256 = re.compile(r"[0-9a-f]{64}")
T = TypeVar("T")


class StoredImage(NamedTuple):
    """An image of the image store."""

    sha256: str
    bytes: int
    time: float  # when it was last put


class ImageStore:
    """Images under `<prefix>images/ab/<sha256>`; the prefix is empty, or ends with a slash."""

    def __init__(self, folder: DataFolder, prefix: str = "") -> None:
        self._storage, self._prefix = storage_of(folder), prefix

    def __repr__(self) -> str:
        return f"ImageStore({self._storage.location(self._prefix)!r})"

    def put(self, data: bytes) -> str:
        """Store an image and return its sha256. A second call repairs a damaged file and renews its time."""
        sha = sha256_bytes(data)
        key = self._key(sha)
        try:
            if self._storage.shared:
                self._storage.put(key, data)  # one request, which also repairs it and renews its time
            elif not self._storage.put_if_absent(key, data):
                with suppress(PermissionError, FileNotFoundError):  # the file of another user keeps its age
                    self._storage.compare_and_set(key, self._storage.get(key), data)
                self._storage.put_if_absent(key, data)  # it may have been removed since
        except OSError as error:
            raise StoreError(
                f"image {sha} cannot be stored ({error}): check the space and the rights of the data folder"
            ) from error
        return sha

    def put_all(self, images: Iterable[bytes]) -> None:
        """Store several images; an object store gets several of them at a time."""
        put_each(self._storage, self.put, images)

    def read(self, sha: str) -> bytes:
        """Return the verified bytes of an image; `StoreError` when they are missing or have changed."""
        try:
            data = self._storage.get(self._key(sha))
        except FileNotFoundError as error:
            raise StoreError(f"image {sha} is not in the store: submit it again") from error
        except OSError as error:
            raise StoreError(f"image {sha} cannot be read ({error}): check the data folder") from error
        if sha256_bytes(data) != sha:
            raise StoreError(f"image {sha} is corrupt, its bytes have changed: submit it again to repair the file")
        return data

    def find(self, sha: str) -> StoredImage | None:
        """Return size and time of an image; None when it is not stored."""
        found = self._storage.find(self._key(sha))
        return StoredImage(sha, found.size, found.time) if found else None

    def find_all(self, shas: Collection[str]) -> dict[str, StoredImage]:
        """Return those that are stored; a listing takes the place of many requests to an object store."""
        if self._storage.shared and len(shas) > LISTED_FROM:
            wanted = set(shas)
            return {image.sha256: image for image in self if image.sha256 in wanted}
        found = (self.find(sha) for sha in shas if is_sha256(sha))
        return {image.sha256: image for image in found if image is not None}

    def __contains__(self, sha: object) -> bool:
        return isinstance(sha, str) and is_sha256(sha) and self._storage.find(self._key(sha)) is not None

    def keys(self) -> set[str]:
        """The sha256 of every image in a local folder. Faster than to look for thousands of them one by one."""
        folder = self._storage.local_path(f"{self._prefix}images")
        with suppress(FileNotFoundError):
            return {name for part in os.listdir(folder) for name in _listed(folder / part) if is_sha256(name)}
        return set()

    def __iter__(self) -> Iterator[StoredImage]:
        for found in self._storage.list(f"{self._prefix}images/"):
            sha = found.key.rpartition("/")[2]
            if is_sha256(sha):
                yield StoredImage(sha, found.size, found.time)

    def erase(self, images: Iterable[StoredImage]) -> list[StoredImage]:
        """Delete images durably: a power cut cannot bring them back. Returns those deleted."""
        erased = list(images)
        self._delete([image.sha256 for image in erased])
        return erased

    def drop_copies(self, shas: Iterable[str]) -> None:
        """Remove local copies of images that another machine has erased."""
        self._storage.drop_copies(self._key(sha) for sha in shas)

    def remove(self, *shas: str) -> None:
        """Delete images that nothing refers to. Idempotent, so that a repeated clean-up can finish."""
        self._delete(shas)

    def _delete(self, shas: Iterable[str]) -> None:
        try:
            self._storage.delete(self._key(sha) for sha in shas)
        except OSError as error:
            raise StoreError(f"images cannot be removed ({error}): check the rights of the data folder") from error

    def _key(self, sha: str) -> str:
        check_sha256(sha)
        return f"{self._prefix}images/{sha[:2]}/{sha}"


def is_sha256(text: str) -> bool:
    return _SHA256.fullmatch(text) is not None


def check_sha256(text: str) -> None:
    """StoreError unless it is the sha256 of an image: only such a text may become part of a path."""
    if not is_sha256(text):
        raise StoreError(f"{text[:80]!r} is not the sha256 of an image: expected 64 lower-case hex digits")


def put_each(storage: Storage, put: Callable[[T], object], values: Iterable[T]) -> None:
    """Call `put` for each value; an object store gets several of them at a time. Not all values are in memory."""
    if not storage.shared:
        for value in values:
            put(value)
        return
    unread = iter(values)
    with ThreadPoolExecutor(PARALLEL_REQUESTS) as threads:
        while part := list(islice(unread, PARALLEL_REQUESTS)):
            list(threads.map(put, part))


def _listed(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
