"""Retention of stored images: what refers to an image, and removing images one by one or by age.

Images of a task are replayed to later tasks, so a version names those that it needs (its samples). A version that
has lost images keeps answering, and later tasks are learned with the rest (`Samples.without_missing`). Nothing is
removed by age when it cannot be found out what is needed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from models.errors import CorruptVersion
from models.versions.manifest import parse_json
from models.versions.store import VersionStore
from tasks.images.erasures import record_erasure
from tasks.images.feature_cache import erase_cached
from tasks.images.feature_store import FeatureStore
from tasks.images.store import ImageStore, StoredImage

UnfinishedImages = Callable[[], Mapping[str, Collection[str]]]  # id of an unfinished task -> keys of its images


@dataclass(frozen=True)
class ImageReferences:
    """What refers to an image."""

    stored: StoredImage | None
    features: StoredImage | None  # what is kept in its place
    replayed_by: tuple[int, ...]  # versions with the image in their replay memory
    held_out_by: tuple[int, ...]  # versions with the image among their held-out images
    learned_by: tuple[int, ...]  # versions whose training used it, or that of a version before them
    rejected_by: tuple[str, ...]  # tasks whose result the gate rejected, and whose training used it
    in_current: bool  # the current version needs it
    tasks: tuple[str, ...]  # unfinished tasks that contain it

    @property
    def dependents(self) -> list[str]:
        """Return one sentence per version and task that needs the image."""
        return [
            *(f"version {n} has it in its replay memory" for n in self.replayed_by),
            *(f"version {n} is evaluated with it" for n in self.held_out_by),
            *(f"task {id} contains it and has not ended" for id in self.tasks),
        ]


@dataclass(frozen=True)
class Expired:
    """Images beyond an age."""

    removable: tuple[StoredImage, ...]
    needed: tuple[StoredImage, ...]  # by the current version or an unfinished task


class Retention:
    """The stored images of a data folder and their references. Reads the disk: call it in a thread.

    `unfinished_images` asks the queue, if there is one. Its errors are passed on, and nothing is removed then.
    """

    def __init__(self, store: VersionStore, unfinished_images: UnfinishedImages = dict) -> None:
        self._store, self._unfinished_images = store, unfinished_images
        self._images, self._features = ImageStore(store.storage), FeatureStore(store.storage)

    def references(self, sha256: str) -> ImageReferences:
        """Find everything that refers to an image: versions on disk, and unfinished tasks."""
        tasks = tuple(id for id, images in self._unfinished_images().items() if sha256 in images)
        replayed_by, held_out_by, learned_by = [], [], []
        for version in self._store.versions():
            parts = self._parts_with(version, sha256)
            replayed_by += [version] * ("memory" in parts)
            held_out_by += [version] * ("held_out" in parts)
            learned_by += [version] * bool(parts)
        try:
            current = self._store.current()
        except CorruptVersion:
            current = None
        in_current = current in {*replayed_by, *held_out_by}
        return ImageReferences(
            self._images.find(sha256),
            self._features.find(sha256),
            tuple(replayed_by),
            tuple(held_out_by),
            tuple(learned_by),
            self._rejected_with(sha256),
            in_current,
            tasks,
        )

    def expired(self, days: float) -> Expired:
        """Find the images that were last submitted more than `days` ago."""
        needed = self._needed_now()
        before = time.time() - days * 86400
        old = [image for image in self._stored() if image.time < before]
        return Expired(
            removable=tuple(image for image in old if image.sha256 not in needed),
            needed=tuple(image for image in old if image.sha256 in needed),
        )

    def _stored(self) -> Iterator[StoredImage]:
        """The images, and those of which only features are kept."""
        yield from self._images
        yield from (found for found in self._features if found.sha256 not in self._images)

    def remove_expired(self, days: float, by: str) -> list[StoredImage]:
        """Remove the removable expired images and return them. May be interrupted and repeated."""
        return self._erase(self.expired(days).removable, by)

    def remove(self, sha256: str, by: str) -> list[StoredImage]:
        """Remove an image whatever refers to it. Returns it, or nothing when it was not stored."""
        image = self._images.find(sha256)
        if image is None:
            image = self._features.find(sha256)
        erased = self._erase([image] if image else [], by)
        self._features.erase([sha256])  # also if an earlier erasure was interrupted before these steps
        erase_cached(self._store.root, [sha256])
        return erased

    def _erase(self, images: Collection[StoredImage], by: str) -> list[StoredImage]:
        record_erasure(self._store.storage, [image.sha256 for image in images], by)
        erased = self._images.erase(images)
        self._features.erase(image.sha256 for image in erased)
        erase_cached(self._store.root, [image.sha256 for image in erased])
        return erased

    def _needed_now(self) -> set[str]:
        # Read the tasks before the current version: a task that is published in between is then in at least one of
        # the two. In the other order it could be in neither, and the replay memory of its version would be removed.
        tasks = self._unfinished_images()
        current = self._store.current()
        needed = {sha256 for images in tasks.values() for sha256 in images}
        if current is not None:
            needed = needed.union(*images_by_part(self._store.samples(current)).values())
        return needed

    def _rejected_with(self, sha256: str) -> tuple[str, ...]:
        """The tasks with a rejected result whose samples name the image; a damaged result is left out."""
        found = []
        for task, manifest in self._store.rejected().items():
            with suppress(CorruptVersion):
                if sha256.encode() in self._store.samples_text(manifest.version, manifest):
                    found.append(task)
        return tuple(found)

    def _parts_with(self, version: int, sha256: str) -> set[str]:
        """Return the parts of a version's samples that name the image: `memory`, `held_out`, `pending`, `seen`."""
        try:
            text = self._store.samples_text(version)
            if sha256.encode() not in text:  # ten times as fast as parsing; true for most versions
                return set()
            by_part = images_by_part(parse_json(text, name=f"version {version}: samples"))
        except CorruptVersion as error:
            # Damaged: report a dependent rather than miss one.
            return set() if error.damage == "missing" else {"memory"}
        return {part for part, images in by_part.items() if sha256 in images} | {"seen"}


def images_by_part(samples: Any) -> dict[str, set[str]]:
    """Return the images that a version's samples need. Its part `seen` needs none: it only remembers hashes."""
    try:
        return {
            "memory": {key for keys in samples["memory"].values() for key in keys},
            "held_out": {row["key"] for row in samples["held_out"]},
            "pending": {
                key for images in samples.get("pending", {}).values() for keys in images.values() for key in keys
            },
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise CorruptVersion(f"the samples are not what a trainer writes ({error!r})") from error
