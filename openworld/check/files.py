"""Checks of files: images match their names, nothing is orphaned, no temporary file was left behind."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from models import files
from models.errors import CorruptVersion, StoreError
from models.storage import Storage
from models.versions.contents import FOLDERS, content_key
from models.versions.keep import recorded_keep, why_discarded
from models.versions.manifest import Manifest
from models.versions.pruning import YOUNG_SECONDS
from models.versions.reader import GRAPHS, REJECTED, VERSIONS, graph_key
from models.versions.store import VersionStore
from openworld.check.report import Finding, Report
from openworld.check.versions import current_or_none
from tasks.discarding import UPLOAD_SECONDS
from tasks.errors import UnknownTask
from tasks.images import FeatureStore, ImageStore, cache_files, erased_images
from tasks.queue import ENDED, TaskQueue
from trainer.learning.checkpoint import checkpointed_tasks
from trainer.learning.memory import Samples

ORPHAN_SECONDS = 86400.0  # the images of a batch are stored before its task exists, and a client may send it again

# What the programs keep in a data folder; a name that begins with a dot is a lock or a temporary file.
KNOWN = re.compile(
    r"FORMAT|ID|KEEP|CURRENT|erasures\.jsonl|audit\.jsonl|(shared-)?keys\.json|backbone\.(json|safetensors)|versions"
    r"|promotions|tasks|heads|samples|kept|rejected|graphs|queues|images|features|cache|inbox|novelties|objects|work|spool|redis|format-\d+|lost\+found|\..*"
)


def check_files(storage: Storage, queue: TaskQueue | None, report: Report, *, hash_images: bool) -> Iterator[Finding]:
    root = storage.root
    yield from _check_temporaries(root)
    yield from _check_images(storage, queue, report, hash_images)
    yield from _check_contents(storage)
    yield from _check_cache(storage)
    yield from _check_checkpoints(storage, queue)
    for path in sorted(root.iterdir()):
        if not KNOWN.fullmatch(path.name):
            yield Finding("unknown_file", path.name, "openworld does not use this file", note=True)


def _check_temporaries(root: Path) -> Iterator[Finding]:
    remedy = "left by a killed process: the next start of a server, or the next version, removes it"
    for path in files.abandoned(root):
        place = path.relative_to(root)
        # Checkpoints are removed as a whole, and Redis has files of its own.
        if place.parts[0] not in ("work", "redis"):
            yield Finding("temporary_file", str(place), remedy)


def _check_images(storage: Storage, queue: TaskQueue | None, report: Report, hash_images: bool) -> Iterator[Finding]:
    store, images, erased = VersionStore(storage), ImageStore(storage), erased_images(storage)
    stored = list(images)
    report.checked["images"] = len(stored)
    if hash_images:
        for image in stored:
            try:
                images.read(image.sha256)
            except StoreError as error:
                if image.sha256 in images:
                    yield Finding("image_damaged", f"image {image.sha256}", str(error))
    tasks = _images_of_tasks(queue)
    named: set[str] = set()
    needed: dict[str, str] = {sha256: f"task {id}" for id, (ended, own) in tasks.items() if not ended for sha256 in own}
    current = current_or_none(store)
    for n in store.versions():
        with suppress(CorruptVersion, OSError, ValueError):  # reported by the check of versions
            samples = Samples.from_json(store.samples(n))
            named = named.union(samples.keys, *samples.seen.values())
            if n == current:
                needed |= dict.fromkeys(samples.keys - needed.keys(), f"version {n}")
    features = FeatureStore(storage)
    keep = recorded_keep(storage)
    keeps_images = keep == "images"
    if not keeps_images:  # what was discarded is not lost
        erased = erased_images(storage, with_features=True)
    for sha256, by in needed.items():
        if sha256 not in images and sha256 not in erased and (keeps_images or sha256 not in features):
            yield Finding("image_missing", f"image {sha256}", f"{by} needs it, and it was not erased: restore a backup")
    if queue is None:
        return
    if not keeps_images:
        unfinished = {sha256 for ended, own in tasks.values() if not ended for sha256 in own}
        left = [one for one in stored if one.sha256 not in unfinished and time.time() - one.time > UPLOAD_SECONDS]
        if left:
            message = f"{len(left)} images remain, which this folder does not keep: start a trainer, it discards them"
            yield Finding("image_kept", "images", message)
        kept = {found.sha256 for found in (*features, *cache_files(storage.root))} - unfinished
        if kept and keep == "statistics":
            message = f"features of {len(kept)} images remain, which this folder does not keep: start a trainer, it "
            yield Finding("features_kept", "features", f"{message}discards them")
    for _, own in tasks.values():
        named |= own
    orphans = [one for one in stored if one.sha256 not in named and time.time() - one.time > ORPHAN_SECONDS]
    if orphans:
        size = sum(image.bytes for image in orphans)
        message = f"{len(orphans)} images ({size} bytes) are in no version and no known task: see DELETE /images"
        yield Finding("orphan_images", "images", message, note=True)


def _images_of_tasks(queue: TaskQueue | None) -> dict[str, tuple[bool, set[str]]]:
    """Task -> whether it has ended, and its images."""
    found: dict[str, tuple[bool, set[str]]] = {}
    for summary in [] if queue is None else queue.list_tasks(limit=None):
        with suppress(UnknownTask):  # ended since, and deleted from the history
            task = queue.get(summary.id) if queue else None
            if task is not None:
                found[task.id] = task.state in ENDED, task.images
    return found


def _check_contents(storage: Storage) -> Iterator[Finding]:
    """Contents and graphs that no manifest names. Without versions, graphs may be of a training that runs."""
    store, named, graphs = VersionStore(storage), set[str](), set[str]()
    keep, current = recorded_keep(storage), store.current_or_logged()
    for place in (VERSIONS, REJECTED):
        for found in store.storage.list(place):
            with suppress(CorruptVersion, OSError):
                manifest = Manifest.from_json(store.storage.get(found.key))
                graphs |= {graph_key(sha256) for sha256 in manifest.graphs.values()}
                if not why_discarded(keep, manifest, current):
                    named |= {content_key(role, entry.sha256) for role, entry in manifest.files.items()}
    for found in store.storage.list(GRAPHS) if graphs else ():
        if found.key not in graphs:
            yield Finding("orphan_graph", found.key, "no version uses this graph: `openworld prune` removes it")
    orphans = [found for place in FOLDERS for found in store.storage.list(place) if found.key not in named]
    if keep == "statistics" and (kept := [found for found in orphans if time.time() - found.time > YOUNG_SECONDS]):
        message = f"{len(kept)} contents of discarded versions remain: start a trainer, it removes them"
        yield Finding("sums_kept", "contents", message)
    elif orphans:
        size = sum(found.size for found in orphans)
        message = f"{len(orphans)} contents ({size} bytes) are in no version: `openworld prune` removes them"
        yield Finding("orphan_contents", "contents", message, note=True)


def _check_cache(storage: Storage) -> Iterator[Finding]:
    """The features of an erased image must be erased too. Damaged entries are computed again."""
    images, features, root = ImageStore(storage), FeatureStore(storage), storage.root
    for file in cache_files(root):
        if file.sha256 not in images and file.sha256 not in features and file.path.exists():
            place, message = str(file.path.relative_to(root)), "the image is not stored any more: remove the file"
            yield Finding("orphan_features", place, message)


def _check_checkpoints(storage: Storage, queue: TaskQueue | None) -> Iterator[Finding]:
    """A rejected, failed or cancelled task keeps its checkpoint: it resumes from there if it is submitted again."""
    store = VersionStore(storage)
    for task_id in checkpointed_tasks(storage):
        version = store.find_task(task_id)
        if version is not None and not _is_unfinished(queue, task_id):
            message = f"the task is version {version} already: remove the folder"
            yield Finding("orphan_checkpoint", f"work/{task_id}", message)


def _is_unfinished(queue: TaskQueue | None, id: str) -> bool:
    try:
        return queue is not None and queue.get(id).state not in ENDED
    except UnknownTask:
        return False
