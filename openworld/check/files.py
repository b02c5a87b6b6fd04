"""Checks of files: images match their names, nothing is orphaned, no temporary file was left behind."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from models import files
from models.errors import CorruptVersion, StoreError
from models.versions.manifest import Manifest, parse_json
from models.versions.store import MANIFEST, SAMPLES, VersionStore
from openworld.check.report import Finding, Report
from openworld.check.versions import current_or_none
from tasks.errors import UnknownTask
from tasks.images import ImageStore, erased_images
from tasks.queue import ENDED, TaskQueue
from trainer.learning.memory import Samples

ORPHAN_SECONDS = 86400.0  # the images of a batch are stored before its task exists, and a client may send it again

# What the programs keep in a data folder; a name that begins with a dot is a lock or a temporary file.
KNOWN = re.compile(
    r"FORMAT|ID|CURRENT|promotions\.jsonl|erasures\.jsonl|audit\.jsonl|keys\.json|backbone\.(json|safetensors)|versions"
    r"|rejected|graphs|images|inbox|work|spool|redis|format-\d+|lost\+found|\..*"
)


def check_files(root: Path, queue: TaskQueue | None, report: Report, *, hash_images: bool) -> Iterator[Finding]:
    yield from _check_temporaries(root)
    yield from _check_images(root, queue, report, hash_images)
    yield from _check_graphs(root)
    yield from _check_checkpoints(root, queue)
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
    folders = [path for place in ("versions", "rejected") for path in (root / place).glob(f".*{files.TEMPORARY}")]
    if folders and _store_is_idle(root):
        for path in folders:
            if path.exists():
                yield Finding("temporary_file", str(path.relative_to(root)), remedy)


def _store_is_idle(root: Path) -> bool:
    """Whether no process is writing versions."""
    try:
        with files.file_lock(root / ".lock", 0.0):
            return True
    except OSError:  # locked, or a folder that cannot be written
        return False


def _check_images(root: Path, queue: TaskQueue | None, report: Report, hash_images: bool) -> Iterator[Finding]:
    store, images, erased = VersionStore(root), ImageStore(root), erased_images(root)
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
            samples = Samples.from_json(parse_json((store.folder(n) / SAMPLES).read_bytes(), name=SAMPLES))
            named = named.union(samples.keys, *samples.seen.values())
            if n == current:
                needed |= dict.fromkeys(samples.keys - needed.keys(), f"version {n}")
    for sha256, by in needed.items():
        if sha256 not in images and sha256 not in erased:
            yield Finding("image_missing", f"image {sha256}", f"{by} needs it, and it was not erased: restore a backup")
    if queue is None:
        return
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
                found[task.id] = task.state in ENDED, {key for keys in task.classes.values() for key in keys}
    return found


def _check_graphs(root: Path) -> Iterator[Finding]:
    """Without versions the graphs may be of a training that runs or will be resumed."""
    named: set[str] = set()
    manifests = [*(root / "versions").glob(f"[!.]*/{MANIFEST}"), *(root / "rejected").glob(f"[!.]*/{MANIFEST}")]
    for path in manifests:
        with suppress(CorruptVersion, OSError):
            named |= set(Manifest.from_json(path.read_bytes()).graphs.values())
    for path in (root / "graphs").glob("[!.]*") if named else ():
        if path.stem not in named:
            yield Finding("orphan_graph", f"graphs/{path.name}", "no version uses this graph: remove it")


def _check_checkpoints(root: Path, queue: TaskQueue | None) -> Iterator[Finding]:
    """A rejected, failed or cancelled task keeps its checkpoint: it resumes from there if it is submitted again."""
    store = VersionStore(root)
    for folder in (root / "work").glob("[!.]*"):
        version = store.find_task(folder.name)
        if version is not None and not _is_unfinished(queue, folder.name):
            yield Finding(
                "orphan_checkpoint", f"work/{folder.name}", f"the task is version {version} already: remove the folder"
            )


def _is_unfinished(queue: TaskQueue | None, id: str) -> bool:
    try:
        return queue is not None and queue.get(id).state not in ENDED
    except UnknownTask:
        return False
