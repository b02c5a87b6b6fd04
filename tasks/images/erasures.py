"""The log of erased images, append-only, with hashes only.

    <data>/erasures.jsonl        of local files: one line per erasure
    erasures/000000001.json      of a shared storage: one value per erasure

An entry is written before the images are removed. It tells an erased image from a lost one, and a backup that is
restored does not bring erased images back.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Container
from contextlib import suppress
from datetime import UTC, datetime

from pydantic import AwareDatetime, BaseModel, ConfigDict, ValidationError

from models.errors import StoreError
from models.files import append_durable, file_lock, fsync_folder
from models.storage import DataFolder, Storage, storage_of
from tasks.images.feature_cache import cache_files, erase_cached
from tasks.images.feature_store import FeatureStore
from tasks.images.store import ImageStore

LOG = "erasures.jsonl"
FOLDER = "erasures/"


class Erasure(BaseModel):
    """An entry of the log."""

    model_config = ConfigDict(frozen=True)

    time: AwareDatetime
    by: str
    sha256s: tuple[str, ...]
    features_kept: bool = False  # only the bytes were removed, because the folder keeps less than images


def record_erasure(folder: DataFolder, sha256s: Collection[str], by: str, *, features_kept: bool = False) -> None:
    """Log that these images are about to be removed; with `features_kept`, their bytes only."""
    if not sha256s:
        return
    storage = storage_of(folder)
    entry = Erasure(time=datetime.now(UTC), by=by, sha256s=tuple(sorted(sha256s)), features_kept=features_kept)
    data = entry.model_dump_json().encode()
    path = storage.root / LOG
    try:
        if storage.shared:
            number = max(_numbers(storage), default=0) + 1
            while not storage.put_if_absent(entry_key(number), data):
                number += 1
            return
        with file_lock(path):
            append_durable(path, data)
            fsync_folder(storage.root)
    except OSError as error:
        place = storage.location(FOLDER if storage.shared else LOG)
        raise StoreError(f"{place} cannot be written ({error}): nothing is removed") from error


def erasures(folder: DataFolder) -> list[Erasure]:
    """Every erasure, oldest first; an incomplete line was cut off by a crash, before anything was removed."""
    storage = storage_of(folder)
    if storage.shared:
        return [found for number in _numbers(storage) for found in _parse(storage.get(entry_key(number)))]
    try:
        return _parse((storage.root / LOG).read_bytes())
    except FileNotFoundError:
        return []


def _parse(data: bytes) -> list[Erasure]:
    found = []
    for line in data.splitlines():
        with suppress(ValidationError):
            found.append(Erasure.model_validate_json(line))
    return found


def _numbers(storage: Storage) -> list[int]:
    found = (re.fullmatch(rf"{FOLDER}([0-9]{{9,}})\.json", entry.key) for entry in storage.list(FOLDER))
    return sorted(int(number[1]) for number in found if number)


def entry_key(number: int) -> str:
    return f"{FOLDER}{number:09d}.json"


def erased_at(folder: DataFolder, *, with_features: bool = False) -> dict[str, float]:
    """Image -> when its bytes were last erased, in seconds since the epoch.

    `with_features`: only those whose features were erased as well; one that was submitted again since is among them.
    """
    found = (erasure for erasure in erasures(folder) if not (with_features and erasure.features_kept))
    return {sha256: erasure.time.timestamp() for erasure in found for sha256 in erasure.sha256s}


def erased_images(folder: DataFolder, *, with_features: bool = False) -> set[str]:
    """The images of `erased_at`."""
    return set(erased_at(folder, with_features=with_features))


class ErasureFollower:
    """Reads the erasures that are logged from now on. The log is how servers of one folder tell each other."""

    def __init__(self, folder: DataFolder) -> None:
        self._storage = storage_of(folder)
        self._path = self._storage.root / LOG
        self._next = max(_numbers(self._storage), default=0) + 1 if self._storage.shared else 0
        self._offset = self._size()

    def new(self) -> set[str]:
        """The images that were erased since the last call."""
        if self._storage.shared:
            return {sha256 for erasure in self._new_entries() for sha256 in erasure.sha256s}
        if self._size() <= self._offset:
            return set()
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        return {sha256 for erasure in _parse(complete) for sha256 in erasure.sha256s}

    def _new_entries(self) -> list[Erasure]:
        """Asks for the next number only: one request if there is nothing new, and no listing."""
        found: list[Erasure] = []
        while True:
            try:
                found += _parse(self._storage.get(entry_key(self._next)))
            except FileNotFoundError:
                return found
            except OSError:
                if not found:
                    raise
                return found  # they are not read again; the next call reports the error
            self._next += 1

    def _size(self) -> int:
        try:
            return self._path.stat().st_size
        except OSError:
            return 0


def erase_copies(folder: DataFolder, sha256s: Collection[str]) -> None:
    """Remove what this machine keeps of images that are not stored any more: local copies, and cached features."""
    storage = storage_of(folder)
    images = ImageStore(storage)
    gone = set(sha256s) - images.find_all(sha256s).keys()
    images.drop_copies(gone)
    cached, features = gone & {file.sha256 for file in cache_files(storage.root)}, FeatureStore(storage)
    erase_cached(storage.root, [sha256 for sha256 in cached if sha256 not in features])


class KeptImages(Container[str]):
    """The images that a training may use, without a request for each: all but the erased ones.

    Every removal is logged before it happens. An image that was lost otherwise is found out when it is read.
    """

    def __init__(self, folder: DataFolder) -> None:
        self._images, self._erased = ImageStore(folder), erased_images(folder, with_features=True)

    def __contains__(self, sha256: object) -> bool:
        return sha256 not in self._erased or sha256 in self._images
