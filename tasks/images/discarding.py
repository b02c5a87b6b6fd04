"""Discarding images in a data folder that does not keep them; it may keep features (models/versions/keep.py)."""

from __future__ import annotations

from collections.abc import Collection

from models.errors import CorruptVersion
from models.versions.keep import recorded_keep
from models.versions.store import VersionStore
from tasks.images.erasures import record_erasure
from tasks.images.feature_cache import erase_cached
from tasks.images.feature_store import FeatureStore
from tasks.images.retention import images_by_part
from tasks.images.store import ImageStore


def discard_images(
    store: VersionStore, sha256s: Collection[str], by: str, needed: Collection[str] | None = None
) -> None:
    """Remove the bytes of images, and the features of those that are not `needed`, by default by any stored version.

    In a folder that keeps statistics no features are needed. May be interrupted and repeated: images are removed last.
    """
    storage = store.storage
    keeps_features = recorded_keep(storage) == "features"
    record_erasure(storage, sha256s, by, features_kept=keeps_features)
    features, needed = FeatureStore(storage), needed if keeps_features else ()
    unneeded = _unneeded(store, features, set(sha256s)) if needed is None else set(sha256s).difference(needed)
    features.erase(unneeded)
    erase_cached(storage.root, unneeded)
    ImageStore(storage).remove(*sha256s)


def _unneeded(store: VersionStore, features: FeatureStore, sha256s: set[str]) -> set[str]:
    """Those of the images whose features no stored version needs: an older one may be rolled back to.

    Pending images are needed by the current version only: they are of tasks that have not ended.
    """
    try:
        current = store.current()
        if current is not None:
            sha256s = sha256s.difference(*images_by_part(store.samples(current)).values())
        if sha256s.isdisjoint(found.sha256 for found in features):  # mostly: the versions need not be read
            return sha256s
        for version in store.versions():
            try:
                parts = images_by_part(store.samples(version))
            except CorruptVersion as error:
                if error.damage == "missing":  # pruned since it was listed, or lost
                    continue
                raise
            sha256s = sha256s - parts["memory"] - parts["held_out"]
    except CorruptVersion:  # it may be repaired: it keeps the features of these images
        return set()
    return sha256s
