"""Discarding images, in a data folder that does not keep them (models/versions/keep.py).

**When a task has ended, however it ended, the bytes of its images are gone**: from the image store at once, from
inboxes, recent predictions, thumbnails and local copies as soon as their owners have read the log of erasures, within
seconds. Killing any process delays that until its next start. What remains are hashes, and in a folder that keeps
features those that stored versions need. In a folder that keeps statistics, the sums over the images of a task that was
not learned go as well (`models.versions.pruning.discard_sums`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable
from contextlib import suppress

from models import files
from models.errors import StoreError
from models.storage import DataFolder, Storage, storage_of
from models.versions.keep import recorded_keep
from models.versions.pruning import discard_sums
from models.versions.store import VersionStore
from tasks.errors import UnknownTask
from tasks.images import FeatureStore, ImageStore, StoredImage, cache_files, discard_images
from tasks.queue import ENDED, Task, TaskQueue

log = logging.getLogger(__name__)

QUEUES = "queues/"  # one value for each queue that images of this folder were submitted to, named by its identity
UPLOAD_SECONDS = 3600.0  # images are stored before their task is queued: younger ones may be of a batch on its way


def record_queue(folder: DataFolder, queue: TaskQueue) -> None:
    """Record that tasks of this queue need images of the folder. Call it before the images of a batch are stored."""
    storage, key = storage_of(folder), f"{QUEUES}{queue.identity()}"
    try:
        if storage.find(key) is None:
            storage.put_if_absent(key, b"")
    except OSError as error:
        raise StoreError(
            f"{storage.location(key)} cannot be written ({error}): check the space and the rights of the data folder"
        ) from error


def other_queues(folder: DataFolder, queue: TaskQueue) -> list[str]:
    """The places of the records of other queues: their tasks may need images of the folder."""
    storage, own = storage_of(folder), f"{QUEUES}{queue.identity()}"
    return sorted(storage.location(found.key) for found in storage.list(QUEUES) if found.key != own)


def discard_task(store: VersionStore, queue: TaskQueue, task: Task, since: float) -> None:
    """Discard the images of a task that has ended, or whose version is published.

    Those that another task needs stay, and those that were stored after `since`: another batch is about to name them.
    """
    others = (needed for id, needed in queue.unfinished_images().items() if id != task.id)
    images = _not_stored_since(store, task.images.difference(*others), since)
    discard_images(store, images, f"end of task {task.id}")


def withdraw_batch(store: VersionStore, queue: TaskQueue, task: Task, since: float) -> None:
    """Remove the stored images of a batch that became no task. Copies elsewhere stay: people may submit them again.

    Those that another task needs stay, and those that were stored after `since`.
    """
    images = task.images.difference(*queue.unfinished_images().values())
    ImageStore(store.storage).remove(*_not_stored_since(store, images, since))


def _not_stored_since(store: VersionStore, images: Collection[str], since: float) -> set[str]:
    found = ImageStore(store.storage).find_all(images)
    return {sha256 for sha256 in images if sha256 not in found or found[sha256].time <= since}


def discard_ended(store: VersionStore, queue: TaskQueue) -> int:
    """Discard what killed processes have left of ended tasks and of batches that became no task.

    Returns the number of images.
    """
    discard_sums(store)
    files.remove_abandoned(store.root / "images")
    stored, features = list(ImageStore(store.storage)), set[str]()
    if recorded_keep(store.storage) == "statistics":  # left by a conversion
        features = {found.sha256 for found in [*FeatureStore(store.storage), *cache_files(store.root)]}
    if not stored and not features:
        return 0
    unfinished = {sha256 for needed in queue.unfinished_images().values() for sha256 in needed}
    discard_images(store, features - unfinished, "conversion")
    left = [image for image in stored if image.sha256 not in unfinished]
    gone = _ended_images(store.storage, left, queue) if left else []
    discard_images(store, gone, "end of tasks")
    return len(gone)


def _ended_images(storage: Storage, left: Iterable[StoredImage], queue: TaskQueue) -> list[str]:
    """Those that were stored before the end of a task that has them, or that no batch can be about to name.

    The latter only if no other queue can have tasks with them.
    """
    ended_at: dict[str, float] = {}
    for summary in queue.list_tasks(limit=None, states=sorted(ENDED)):
        with suppress(UnknownTask):  # no longer in the history
            for key in queue.get(summary.id).images:
                ended_at[key] = max(ended_at.get(key, 0.0), summary.updated.timestamp())
    before = time.time() - UPLOAD_SECONDS
    ended = [image.sha256 for image in left if image.time <= ended_at.get(image.sha256, 0.0)]
    in_no_task = [image.sha256 for image in left if ended_at.get(image.sha256, 0.0) < image.time <= before]
    return ended + in_no_task if in_no_task and _is_only_queue(storage, queue) else ended


def _is_only_queue(storage: Storage, queue: TaskQueue) -> bool:
    """Whether no other Redis server, such as one before a change of OPENWORLD_REDIS_URL, can have tasks."""
    if others := other_queues(storage, queue):
        log.error(
            "images that no task of this queue has remain: images were also submitted through another Redis server, "
            "whose tasks may need them. If OPENWORLD_REDIS_URL is right and the tasks of the other one are of no use, "
            "delete %s",
            ", ".join(others),
        )
    return not others and next(iter(storage.list(QUEUES)), None) is not None
