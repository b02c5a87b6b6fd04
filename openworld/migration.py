"""Copy a data folder into an object store, or back: `openworld migrate`.

**Every value is verified, and `CURRENT` comes last**: until then the target has no current version. A call that was
interrupted can be repeated; what the target holds already is compared, not copied again. The source is only read.

Copied is what belongs to all machines: versions and their contents, images or the features in their place, the images
of an inbox that servers share, backbone, the logs of promotions and erasures, format, id, and what the folder keeps. A
folder that does not keep images gives none to the copy: neither those of its inbox, nor those of tasks, which must have
ended. A server's own inbox, keys, audit log, embedded Redis and caches belong to one machine. Checkpoints are left out:
a task that is being learned starts again.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

from models.errors import OpenWorldError
from models.files import sha256_bytes
from models.storage import Storage
from models.storage.object_cache import content_hash
from models.versions.backbone_spec import RECORD, recorded_backbone, weights_key
from models.versions.contents import FOLDERS
from models.versions.data_format import MARKER as FORMAT
from models.versions.data_format import check_format
from models.versions.folder_id import MARKER as ID
from models.versions.keep import RECORD as KEEP
from models.versions.keep import recorded_keep
from models.versions.promotions import FOLDER as PROMOTIONS
from models.versions.pruning import MARKS
from models.versions.reader import CURRENT, GRAPHS, REJECTED, VERSIONS, version_number
from tasks.images.erasures import LOG, entry_key, erased_images, erasures
from tasks.images.feature_store import FeatureStore
from tasks.images.store import NOVELTIES, ImageStore

NOVEL_IMAGES = f"{NOVELTIES}images/"
THREADS = 8  # a store answers several requests at a time
CHUNK = 256
# In the order of publishing: a manifest follows its contents.
COPIED = (*FOLDERS, GRAPHS, "images/", "features/", NOVEL_IMAGES, PROMOTIONS, REJECTED, VERSIONS, MARKS)
REPLACEABLE = (REJECTED, MARKS)  # values that may change in the source between two calls


def migrate(source: Storage, target: Storage, on_value: Callable[[int], None] = lambda count: None) -> int | None:
    """Copy everything that belongs to all machines; returns the current version, None if there is none.

    `on_value` gets the number of values that were copied or compared since the last call.
    """
    check_format(source)
    check_format(target)
    before = _get(source, CURRENT)
    if _get(source, FORMAT) is None:
        raise OpenWorldError(f"there is no data folder at {source.location('')}")
    _claim(source, target, before)
    copied = [folder for folder in COPIED if folder != NOVEL_IMAGES or recorded_keep(source) == "images"]
    with ThreadPoolExecutor(THREADS) as threads:
        keys = (found.key for folder in copied for found in source.list(folder))
        while chunk := list(islice(keys, CHUNK)):
            for _ in threads.map(lambda key: _copy(source, key, target, key), chunk):
                on_value(1)
    _copy_backbone(source, target)
    _copy_erasures(source, target)
    _remove_erased(source, target)
    if _get(source, CURRENT) != before:
        raise OpenWorldError(
            f"another version became current in {source.location('')} during the copy: stop the programs that use it, "
            "and run the same command again"
        )
    if before is not None:
        _put(target, CURRENT, f"{version_number(before)}\n".encode())
    return version_number(before)


def _claim(source: Storage, target: Storage, current: bytes | None) -> None:
    """Give the target the id of the source; OpenWorldError if it holds another data folder, or one that is in use."""
    own, there = _get(source, ID), _get(target, ID)
    if there is not None and there != own:
        raise OpenWorldError(f"{target.location('')} holds another data folder: give an empty place")
    found = _get(target, CURRENT)
    if found is not None and (there is None or version_number(found) != version_number(current)):
        raise OpenWorldError(
            f"version {version_number(found)} is current in {target.location('')} already: give an empty place"
        )
    if recorded_keep(source) != "images" and next(iter(ImageStore(source)), None) is not None:
        raise OpenWorldError(
            f"{source.location('')} keeps no images, and has those of unfinished tasks, which the copy would keep: "
            "start the service again until its tasks have ended"
        )
    for key, value in ((FORMAT, _get(source, FORMAT)), (KEEP, _get(source, KEEP)), (ID, own)):
        if value is not None:
            _put(target, key, value)


def _copy_backbone(source: Storage, target: Storage) -> None:
    spec = recorded_backbone(source)
    if spec is None:
        return
    sha256 = spec.weights_sha256
    if _get(source, weights_key(source, sha256)) is not None:  # versions answer without the weights
        _copy(source, weights_key(source, sha256), target, weights_key(target, sha256), sha256)
    _copy(source, RECORD, target, RECORD)


def _copy_erasures(source: Storage, target: Storage) -> None:
    entries = [erasure.model_dump_json().encode() for erasure in erasures(source)]
    if target.shared:
        for number, entry in enumerate(entries, 1):
            _put(target, entry_key(number), entry)
    elif entries:
        target.put(LOG, b"".join(entry + b"\n" for entry in entries))


def _remove_erased(source: Storage, target: Storage) -> None:
    """An earlier call, or this one, may have copied images or features that were erased in the source since."""
    for prefix in ("", NOVELTIES):
        images = ImageStore(target, prefix)
        for sha256 in erased_images(source) - {image.sha256 for image in ImageStore(source, prefix)}:
            images.remove(sha256)
    kept = {features.sha256 for features in FeatureStore(source)}
    FeatureStore(target).erase(erased_images(source, with_features=True) - kept)


def _copy(source: Storage, key: str, target: Storage, target_key: str, sha256: str | None = None) -> None:
    sha256 = sha256 or content_hash(key)
    try:
        data = source.get(key)
    except FileNotFoundError:
        return  # removed since it was listed
    if sha256 is not None and sha256_bytes(data) != sha256:
        raise OpenWorldError(f"{source.location(key)} is damaged, its bytes have changed: repair it from a backup")
    if key.startswith(REPLACEABLE):
        target.put(target_key, data)
    else:
        _put(target, target_key, data)


def _put(target: Storage, key: str, data: bytes) -> None:
    """Create a value and read it back; one that the target holds must be the same."""
    target.put_if_absent(key, data)
    if _stored(target, key) == data:
        return
    if content_hash(key) is None:
        raise OpenWorldError(f"{target.location(key)} differs from the source: give an empty place")
    target.put(key, data)  # damaged, or cut off by a full disk
    if _stored(target, key) != data:
        raise OpenWorldError(f"{target.location(key)} does not keep what is written: check the target")


def _stored(target: Storage, key: str) -> bytes:
    target.drop_copies([key])  # what the target itself holds
    return target.get(key)


def _get(storage: Storage, key: str) -> bytes | None:
    try:
        return storage.get(key)
    except (FileNotFoundError, NotADirectoryError):
        return None
