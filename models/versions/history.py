"""The history of versions for operators: what each version learned, its metrics, and its parent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from models.errors import CorruptVersion
from models.versions.keep import recorded_keep, why_discarded
from models.versions.manifest import Manifest
from models.versions.store import VersionStore


def history(store: VersionStore, current: int | None) -> Iterator[dict[str, Any]]:
    """Every version on disk, oldest first, with the classes that it added to its parent; or why it is damaged.

    `discarded` says why the contents of a version are removed.
    """
    known: dict[int, set[str]] = {}
    keep, promoted = recorded_keep(store.storage), store.current_or_logged()
    for n in store.versions():
        try:
            manifest = store.manifest(n)
        except CorruptVersion as error:
            yield {"version": n, "current": n == current, "damaged": str(error)}
            continue
        known[n] = set(manifest.classes)
        discarded = why_discarded(keep, manifest, promoted)
        before = known.get(manifest.parent, set()) if manifest.parent is not None else set()
        yield {
            **summary(manifest),
            "tasks": manifest.tasks,
            "version": n,
            "current": n == current,
            "parent": manifest.parent,
            "added": [name for name in manifest.classes if name not in before],
            "classes": len(known[n]),
            **({"discarded": discarded} if discarded else {}),
        }


def summary(manifest: Manifest) -> dict[str, Any]:
    """What a version learned, and its two estimates for fresh images, measured on images left out of training."""
    metrics = manifest.metrics
    return {
        "task_id": manifest.task_id,
        "created": manifest.created.isoformat(timespec="seconds"),
        "stage": manifest.stage,
        "pending": [one.task_id for one in manifest.pending],
        "learned": metrics.get("images_per_class", {}),
        "accuracy": metrics.get("accuracy"),
        "novelty_auc": metrics.get("novelty_auc"),
        "threshold": manifest.threshold,
        "novel_above": manifest.novel_above,
        "keep": manifest.keep,
        "capacity": metrics.get("capacity", {}).get("used_max"),
    }
