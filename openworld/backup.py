"""Backups of a data folder and its queue, made while the service runs, and their restoration.

    <backup>/backup.json   written last: release, time, and the hash of every other file
    <backup>/data/         the data folder, without checkpoints, cached features, spooled uploads and locks; without
                           images and inbox, if the folder does not keep images
    <backup>/queue.json    the tasks, if there is a queue
    <backup>/inbox.json    the rows of the inbox that servers share, if they do; its images are in data/novelties

**A backup is complete or absent, and its parts fit together.** The order of copying gives this without a pause of the
service. The queue comes first: each of its tasks finds its images and versions, which are stored before and kept. Then
`CURRENT` and the log of promotions, then the versions and their contents, which never change, then images and inbox.
A novelty that was deleted between the copies of its row and of its image is left out.
Erasures come last, and are applied to the copy. `openworld prune` waits meanwhile.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pydantic import AwareDatetime, BaseModel, ValidationError

from models import files
from models.errors import OpenWorldError, StoreError
from models.versions.data_format import FORMAT, check_format
from models.versions.keep import Keep, recorded_keep
from models.versions.pruning import LOCK as PRUNE_LOCK
from models.versions.store import VersionStore
from service.inbox.snapshot import copy_database, novelty_sizes
from service.key_store import SHARED_COPY
from service.shared import inbox_seconds, novelty_rows
from tasks.images import NOVELTIES, FeatureStore, ImageStore, erased_images, record_erasure
from tasks.images.erasures import LOG as ERASURES
from tasks.images.feature_store import feature_key
from tasks.queue import TaskQueue

MANIFEST, DATA, QUEUE, SHARED_INBOX = "backup.json", "data", "queue.json", "inbox.json"
INBOX = "inbox/inbox.sqlite3"
# Copied in their own way, or not at all: a restored folder is another folder, with an id of its own.
OWN_WAY = frozenset({"CURRENT", ERASURES, "ID", SHARED_COPY})


class BackupManifest(BaseModel):
    """`backup.json`."""

    format: int = FORMAT  # of the data folder
    release: str
    created: AwareDatetime
    files: dict[str, str]  # path below the backup -> sha256


def create_backup(root: Path, target: Path, queue: TaskQueue | None) -> list[str]:
    """Copy the data folder `root` to `target`, which must not exist. Returns what is damaged and left out."""
    check_format(root)
    if target.exists():
        raise OpenWorldError(f"{target} exists: give the name of a new folder")
    temporary = files.temporary_beside(target.absolute())
    damaged: list[str] = []
    try:
        data = temporary / DATA
        data.mkdir(parents=True)
        hashes: dict[str, str] = {}
        rows, seconds = dict[str, str](), "0"
        if queue is not None:
            (temporary / QUEUE).write_text(json.dumps(queue.export(), ensure_ascii=False))
            rows, seconds = novelty_rows(queue.client, queue.prefix), inbox_seconds(queue.client, queue.prefix)
        with files.file_lock(root / PRUNE_LOCK):
            for path in _sources(root, VersionStore(root), data):
                place = path.relative_to(root)
                try:
                    hashes[f"{DATA}/{place}"] = digest = _copy(path, data / place)
                except FileNotFoundError:
                    continue  # removed since it was listed: a killed attempt, or an erased image
                if place.parts[0] == "images" and digest != path.name:
                    damaged.append(str(place))
                    (data / place).unlink()
                    del hashes[f"{DATA}/{place}"]
        hashes |= _copy_inbox(root, data)
        if (root / ERASURES).exists():
            hashes[f"{DATA}/{ERASURES}"] = _copy(root / ERASURES, data / ERASURES)
        for gone in [*_erase(data, erased_images(data), root), *_erase_features(data, FeatureStore(root))]:
            hashes.pop(f"{DATA}/{gone}", None)
        for name in ("CURRENT", INBOX):
            if (data / name).exists():
                hashes[f"{DATA}/{name}"] = files.sha256_file(data / name)
        if rows:
            copied = ImageStore(data / NOVELTIES)
            document = {"seconds": seconds, "rows": {id: row for id, row in rows.items() if id in copied}}
            (temporary / SHARED_INBOX).write_text(json.dumps(document))
        for name in (QUEUE, SHARED_INBOX):
            if (temporary / name).exists():
                hashes[name] = files.sha256_file(temporary / name)
        manifest = BackupManifest(release=version("openworld"), created=datetime.now(UTC), files=hashes)
        (temporary / MANIFEST).write_text(manifest.model_dump_json(indent=1))
        os.sync()  # one call for all files
        temporary.rename(target)
        files.fsync_folder(target.absolute().parent)
    except BaseException:
        files.remove(temporary)
        raise
    return damaged


def read_manifest(backup: Path) -> BackupManifest:
    try:
        manifest = BackupManifest.model_validate_json((backup / MANIFEST).read_bytes())
    except (OSError, ValidationError) as error:
        raise OpenWorldError(f"{backup} is not a complete backup ({MANIFEST}: {error})") from error
    if manifest.format > FORMAT:
        raise OpenWorldError(
            f"{backup} has format {manifest.format}, made by openworld {manifest.release}; this one reads {FORMAT}: "
            "upgrade openworld"
        )
    return manifest


def restore_data(backup: Path, target: Path, erased: Iterable[str] = (), erased_features: Iterable[str] = ()) -> None:
    """Write the data folder of a backup to `target`, which must be complete before it is renamed by the caller.

    Every file is verified. `erased` are images that were erased since the backup was made, `erased_features` those of
    them whose features were erased as well.
    """
    for name, expected in read_manifest(backup).files.items():
        if not name.startswith(f"{DATA}/"):
            continue
        try:
            found = _copy(backup / name, target / name.removeprefix(f"{DATA}/"))
        except FileNotFoundError as error:
            raise StoreError(f"{backup / name} is missing: use another backup") from error
        if found != expected:
            raise StoreError(f"{backup / name} has changed since the backup was made: use another backup")
    gone, wholly = set(erased), set(erased_features)
    _erase(target, gone, target)
    FeatureStore(target).erase(wholly)
    record_erasure(target, wholly - erased_images(target, with_features=True), "restore")
    record_erasure(target, gone - erased_images(target), "restore", features_kept=True)


def restored_queue(backup: Path) -> Mapping[str, Any] | None:
    """The verified tasks of a backup; None if it was made without a queue."""
    return _document(backup, QUEUE)


def restored_inbox(backup: Path, target: Path) -> tuple[dict[str, str], str]:
    """The verified rows of the shared inbox whose images were restored to `target`, and the seconds it was open."""
    images, document = ImageStore(target / NOVELTIES), _document(backup, SHARED_INBOX) or {"seconds": "0", "rows": {}}
    return {id: row for id, row in document["rows"].items() if id in images}, document["seconds"]


def _document(backup: Path, name: str) -> dict[str, Any] | None:
    expected = read_manifest(backup).files.get(name)
    if expected is None:
        return None
    data = (backup / name).read_bytes()
    if files.sha256_bytes(data) != expected:
        raise StoreError(f"{backup / name} has changed since the backup was made: use another backup")
    document: dict[str, Any] = json.loads(data)
    return document


# Details


def _sources(root: Path, store: VersionStore, data: Path) -> Iterator[Path]:
    """The files to copy, in the order that keeps the copy consistent; writes CURRENT."""
    with store.locked():  # for milliseconds: no promotion is half done
        if (root / "CURRENT").exists():
            (data / "CURRENT").write_bytes((root / "CURRENT").read_bytes())
        promotions = list(_tree(root / "promotions"))
        promoted = {line.version for line in store.log()}
        manifests = [store.manifest_path(n) for n in store.versions() if n in promoted]
    yield from promotions
    yield from manifests
    for path in sorted(root.iterdir()):
        if path.is_file() and not path.name.startswith(".") and path.name not in OWN_WAY:
            yield path
    # No image outlives its task in a backup of a folder that does not keep images, and no feature its conversion.
    kept: dict[Keep, tuple[str, ...]] = {"images": ("images", NOVELTIES), "features": ("features",), "statistics": ()}
    for name in ("rejected", "kept", "tasks", "heads", "samples", "graphs", *kept[recorded_keep(root)]):
        yield from _tree(root / name)


def _tree(folder: Path) -> Iterator[Path]:
    for place, names, file_names in os.walk(folder):
        names[:] = sorted(name for name in names if not name.startswith("."))
        yield from (Path(place) / name for name in sorted(file_names) if not name.startswith("."))


def _copy_inbox(root: Path, data: Path) -> dict[str, str]:
    """Copy the rows and then their images; a novelty that was deleted in between is left out."""
    if not (root / INBOX).exists() or recorded_keep(root) != "images":
        return {}
    (data / INBOX).parent.mkdir(parents=True, exist_ok=True)
    copy_database(root / INBOX, data / INBOX)
    hashes = {}
    with closing(sqlite3.connect(data / INBOX)) as connection:
        for id in novelty_sizes(connection):
            place = f"inbox/images/{id[:2]}/{id}"
            try:
                hashes[f"{DATA}/{place}"] = _copy(root / place, data / place)
            except FileNotFoundError:
                _delete_novelty(connection, id)
    return hashes


def _erase(data: Path, erased: set[str], source: Path) -> list[str]:
    """Remove erased images from a copied folder, unless they were submitted again; returns their places."""
    places = []
    for folder in ("", NOVELTIES):
        images, again = ImageStore(data / folder), ImageStore(source / folder)
        gone = [sha256 for sha256 in erased if sha256 in images and (source == data or sha256 not in again)]
        places += [f"{folder}images/{sha256[:2]}/{sha256}" for sha256 in gone]
    for place in places:
        (data / place).unlink()
    if not (data / INBOX).exists():
        return places
    with closing(sqlite3.connect(data / INBOX)) as connection:
        for sha256 in erased:
            image = data / "inbox" / "images" / sha256[:2] / sha256
            if image.exists() and (source == data or not (source / image.relative_to(data)).exists()):
                image.unlink()
                _delete_novelty(connection, sha256)
                places.append(str(image.relative_to(data)))
    return places


def _erase_features(data: Path, again: FeatureStore) -> list[str]:
    """Remove the features of erased images from a copied folder, unless the source has them; returns their places."""
    copied = {found.sha256 for found in FeatureStore(data)}
    gone = [sha256 for sha256 in copied & erased_images(data, with_features=True) if sha256 not in again]
    FeatureStore(data).erase(gone)
    return [feature_key(sha256) for sha256 in gone]


def _delete_novelty(connection: sqlite3.Connection, id: str) -> None:
    with connection:
        connection.execute("DELETE FROM novelties WHERE id = ?", (id,))


def _copy(source: Path, target: Path) -> str:
    """Copy a file and return the sha256 of what was copied."""
    digest = hashlib.sha256()
    with source.open("rb") as reading:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb") as writing:
            while chunk := reading.read(1 << 20):
                digest.update(chunk)
                writing.write(chunk)
    shutil.copystat(source, target)  # the age of an image counts from its last submission
    return digest.hexdigest()
