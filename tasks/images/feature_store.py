"""The feature store: what the frozen trunk computes for images that a version needs and whose bytes are not kept.

    features/ab/<sha256>-tokens    one value per image: its tokens, one record per view

Only a data folder that keeps features has it (models/versions/keep.py). Unlike the feature cache, it cannot be computed
again: it is durable, in backups, and in the object store if there is one. When `put` returns, the features survive a
power cut.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from models.errors import StoreError
from models.storage import DataFolder, storage_of
from tasks.images.feature_records import Record, digest_of, packed, unpacked
from tasks.images.store import PARALLEL_REQUESTS, ImageStore, StoredImage, check_sha256, is_sha256, put_each

FOLDER = "features/"
# Not `<sha256>` alone: the storage takes such a name for the hash of the value.
_KEY = re.compile(rf"{FOLDER}[0-9a-f]{{2}}/([0-9a-f]{{64}})-tokens")


class FeatureStore:
    """Tokens by image: view 0 is the plain image, the others are augmented (trainer/learning/tokens.py)."""

    def __init__(self, folder: DataFolder) -> None:
        self._storage = storage_of(folder)

    def put(self, sha256: str, views: Mapping[int, Record]) -> None:
        """Store the tokens of an image, one array (P, d) per view, in place of those that it has."""
        data = b"".join(packed(_kind(n), np.ascontiguousarray(tokens, np.float32)) for n, tokens in views.items())
        try:
            self._storage.put(feature_key(sha256), data)
        except OSError as error:
            raise StoreError(
                f"features of image {sha256} cannot be stored ({error}): check the space and the rights of the data "
                "folder"
            ) from error

    def put_all(self, images: Iterable[tuple[str, Mapping[int, Record]]]) -> None:
        """Store the tokens of several images; an object store gets several of them at a time."""
        put_each(self._storage, lambda one: self.put(*one), images)

    @property
    def remote(self) -> bool:
        """Whether reading takes a request over a network."""
        return self._storage.shared

    def get_all(self, items: Sequence[tuple[str, int]]) -> list[Record | None]:
        """The tokens of images and views, in this order."""
        if not self.remote:
            return [self.get(*item) for item in items]
        with ThreadPoolExecutor(PARALLEL_REQUESTS) as threads:
            return list(threads.map(lambda item: self.get(*item), items))

    def get(self, sha256: str, view: int = 0) -> Record | None:
        """The tokens of a view of an image; None if they are not stored."""
        try:
            data = self._storage.get(feature_key(sha256))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreError(f"features of image {sha256} cannot be read ({error}): check the data folder") from error
        records, end = unpacked(data)
        if end < len(data) or not records:
            raise StoreError(f"features of image {sha256} are damaged: restore a backup, or erase the image")
        found = records.get(digest_of(_kind(view)))
        return None if found is None else found.copy()  # torch requires writable memory

    def find(self, sha256: str) -> StoredImage | None:
        """Size and time of an image's features; None if it has none."""
        found = self._storage.find(feature_key(sha256)) if is_sha256(sha256) else None
        return StoredImage(sha256, found.size, found.time) if found else None

    def __contains__(self, sha256: object) -> bool:
        return isinstance(sha256, str) and self.find(sha256) is not None

    def __iter__(self) -> Iterator[StoredImage]:
        for found in self._storage.list(FOLDER):
            if match := _KEY.fullmatch(found.key):
                yield StoredImage(match[1], found.size, found.time)

    def erase(self, sha256s: Iterable[str]) -> None:
        """Delete the features of images durably; images without features are ignored."""
        try:
            self._storage.delete(feature_key(sha256) for sha256 in sha256s)
        except OSError as error:
            raise StoreError(f"features cannot be removed ({error}): check the rights of the data folder") from error


class KeptFeatures(Container[str]):
    """The images that a training may use in a folder that keeps features: with features, with bytes, or at hand."""

    def __init__(self, folder: DataFolder, at_hand: Container[str] = ()) -> None:
        self._features, self._images, self._at_hand = FeatureStore(folder), ImageStore(folder), at_hand
        # One listing in place of a request for each image. On local files, an erasure during the training counts.
        shared = storage_of(folder).shared
        self._listed = {found.sha256 for found in self._features} if shared else frozenset[str]()

    def __contains__(self, sha256: object) -> bool:
        stored = sha256 in self._listed or sha256 in self._features or sha256 in self._images
        return stored or sha256 in self._at_hand


def _kind(view: int) -> str:
    return f"tokens of view {view}"


def feature_key(sha256: str) -> str:
    check_sha256(sha256)
    return f"{FOLDER}{sha256[:2]}/{sha256}-tokens"
