"""How long images are kept: what depends on one, and removing those that nobody needs, or nobody may keep.

Images that tasks brought are replayed to later tasks, so a version names those that it needs (`samples.json`). A
version that has lost some goes on answering, and later tasks are learned with what is left
(`trainer/memory.py::Samples.without_missing`). Nothing is removed when it cannot be found out who needs it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from models.errors import CorruptVersion, StoreError
from models.files import fsync_folder
from models.versions.manifest import parse_json
from models.versions.store import SAMPLES, VersionStore

_SHA256 = re.compile(r"[0-9a-f]{64}")

Unfinished = Callable[[], Mapping[str, Collection[str]]]  # task -> its images


class Stored(NamedTuple):
    """A file of the image store."""

    sha256: str
    bytes: int
    time: float  # when a task last brought it


@dataclass(frozen=True)
class Uses:
    """Where an image is kept, and who needs it."""

    sha256: str
    stored: Stored | None
    memory: tuple[int, ...]  # versions whose replay memory names it
    held_out: tuple[int, ...]  # versions that are judged by it
    current: bool  # the current version is one of them
    tasks: tuple[str, ...]  # unfinished tasks that bring it

    @property
    def dependents(self) -> list[str]:
        """In words, one each."""
        return [
            *(f"version {n} has it in its replay memory" for n in self.memory),
            *(f"version {n} is judged by it" for n in self.held_out),
            *(f"task {id} brings it and has not ended" for id in self.tasks),
        ]


@dataclass(frozen=True)
class Expired:
    """Images older than some age: those that may go, and how many are needed all the same."""

    removable: tuple[Stored, ...]
    kept: int
    kept_bytes: int

    @property
    def bytes(self) -> int:
        return sum(one.bytes for one in self.removable)


@dataclass(frozen=True)
class Removed:
    """What is gone."""

    sha256s: tuple[str, ...]
    bytes: int


class Retention:
    """The images of one data folder and who needs them. `unfinished` is asked for the tasks of a queue, if there is
    one; when it cannot answer, its error is passed on and nothing is removed. Reads the disk: call it in a thread."""

    def __init__(
        self, store: VersionStore, unfinished: Unfinished | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self._store, self._unfinished, self._clock = store, unfinished, clock
        self._images = store.root / "images"

    def uses(self, sha256: str) -> Uses:
        """Everything that names an image: every version on the disk, and every task that has not ended."""
        tasks = [id for id, images in self._tasks().items() if sha256 in images]
        memory, held_out = [], []
        for version in self._store.versions():
            parts = self._parts_naming(version, sha256)
            memory += [version] * ("memory" in parts)
            held_out += [version] * ("held_out" in parts)
        current = self._current() in {*memory, *held_out}
        return Uses(sha256, self._stored(sha256), tuple(memory), tuple(held_out), current, tuple(tasks))

    def expired(self, days: float) -> Expired:
        """What was brought longer ago than this, with what the current version and unfinished tasks need set apart."""
        needed = self._needed()
        before = self._clock() - days * 86400
        old = [one for one in self._all() if one.time < before]
        kept = [one for one in old if one.sha256 in needed]
        return Expired(tuple(one for one in old if one.sha256 not in needed), len(kept), sum(one.bytes for one in kept))

    def remove_expired(self, days: float) -> Removed:
        """Remove what `expired` calls removable. Killed half-way, or stopped by an error, the rest is still there."""
        return self._remove(self.expired(days).removable)

    def remove(self, sha256: str) -> Removed:
        """Remove one image, whoever needs it; none that is not there."""
        stored = self._stored(sha256)
        return self._remove([stored] if stored else [])

    # Who needs what

    def _needed(self) -> set[str]:
        # The tasks before the version: a task that ends in between is in one of the two. The other way round it could
        # be in neither, and its images, in the memory of the version that it has just become, would go.
        tasks = self._tasks()
        current = self._store.current()
        needed = {sha256 for images in tasks.values() for sha256 in images}
        if current is not None:
            name, samples = f"version {current}: {SAMPLES}", self._read(current)
            if samples is None:
                raise CorruptVersion(f"{name} is missing: nothing is removed", "missing")
            self._store.manifest(current).files[SAMPLES].check(samples, name=name)
            for names in _named(parse_json(samples, name=name)).values():
                needed |= names
        return needed

    def _tasks(self) -> Mapping[str, Collection[str]]:
        return self._unfinished() if self._unfinished is not None else {}

    def _current(self) -> int | None:
        try:
            return self._store.current()
        except CorruptVersion:
            return None

    def _parts_naming(self, version: int, sha256: str) -> set[str]:
        data = self._read(version)
        # Most versions do not name an image, and reading them as text costs a tenth of understanding them.
        if data is None or sha256.encode() not in data:
            return set()
        try:
            named = _named(parse_json(data, name=f"version {version}: {SAMPLES}"))
        except CorruptVersion:
            return {"memory"}  # damaged, but it names the image: better one dependent too many
        return {part for part, names in named.items() if sha256 in names}

    def _read(self, version: int) -> bytes | None:
        try:
            return (self._store.folder(version) / SAMPLES).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreError(f"version {version}: {SAMPLES} cannot be read ({error}): nothing is removed") from error

    # Files

    def _path(self, sha256: str) -> Path:
        if not _SHA256.fullmatch(sha256):
            raise StoreError(f"{sha256[:80]!r} is not the sha256 of an image: expected 64 lower-case hex digits")
        return self._images / sha256[:2] / sha256

    def _stored(self, sha256: str) -> Stored | None:
        try:
            stat = self._path(sha256).stat()
        except OSError:
            return None
        return Stored(sha256, stat.st_size, stat.st_mtime)

    def _all(self) -> Iterator[Stored]:
        for path in self._images.glob("??/*"):
            if _SHA256.fullmatch(path.name) and (stored := self._stored(path.name)) is not None:
                yield stored

    def _remove(self, images: Iterable[Stored]) -> Removed:
        gone = []
        for image in images:
            path = self._path(image.sha256)
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise StoreError(f"image {image.sha256} cannot be removed ({error}): check the rights") from error
            gone.append(image)
        # The folders stay: somebody may be about to put an image into one. Synced, so that no power cut brings back
        # what somebody was told is gone.
        for folder in {self._path(image.sha256).parent for image in gone}:
            with suppress(FileNotFoundError):
                fsync_folder(folder)
        return Removed(tuple(image.sha256 for image in gone), sum(image.bytes for image in gone))


def _named(samples: Any) -> dict[str, set[str]]:
    """The images in each part of `samples.json`. `seen` holds hashes alone: those images may be gone for long."""
    try:
        return {
            "memory": {key for keys in samples["memory"].values() for key in keys},
            "held_out": {row["key"] for row in samples["held_out"]},
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise CorruptVersion(f"{SAMPLES} is not what a trainer writes ({error!r})") from error
