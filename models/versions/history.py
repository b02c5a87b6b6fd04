"""The history of versions for operators: what each version learned, its metrics, and its parent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from models.errors import CorruptVersion
from models.versions.keep import recorded_keep, why_discarded
from models.versions.manifest import Manifest
from models.versions.store import VersionStore


def history(store: VersionStore, current: int | None) -> Iterator[dict[str, Any]]:
    """Every version on disk, oldest first, with the classes that it added; or why it is damaged.

    `discarded` says why the contents of a version are removed.
    """
    known: dict[int, Manifest] = {}
    keep, promoted = recorded_keep(store.storage), store.current_or_logged()
    for n in store.versions():
        try:
            manifest = store.manifest(n)
        except CorruptVersion as error:
            yield {"version": n, "current": n == current, "damaged": str(error)}
            continue
        known[n] = manifest
        discarded = why_discarded(keep, manifest, promoted)
        yield {
            **summary(manifest),
            "tasks": manifest.tasks,
            "version": n,
            "current": n == current,
            "parent": manifest.parent,
            "added": _added(manifest, known.get(manifest.parent or 0)),
            "classes": len(manifest.classes),
            **({"discarded": discarded} if discarded else {}),
        }


def _added(manifest: Manifest, parent: Manifest | None) -> list[str]:
    """Classes that the version is the first to have learned, or the first to answer with before they are learned.

    Compared by id: a renamed class is not added. A parent may be removed.
    """
    if parent is None and manifest.parent is not None:
        return [name for name, id in manifest.id_of.items() if id.startswith(f"{manifest.task_id}.")]
    if parent is not None and not manifest.is_pending(manifest.task_id) and parent.is_pending(manifest.task_id):
        before = {id for ids in parent.class_ids[: parent.learned_tasks] for id in ids}
        candidates = {id for ids in manifest.class_ids[: manifest.learned_tasks] for id in ids}
    else:
        before, candidates = set(parent.id_of.values()) if parent else set(), set(manifest.id_of.values())
    return [name for name, id in manifest.id_of.items() if id in candidates - before]


def summary(manifest: Manifest) -> dict[str, Any]:
    """What a version learned, and its two estimates for fresh images, measured on images left out of training."""
    metrics = manifest.metrics
    return {
        "task_id": manifest.task_id,
        "created": manifest.created.isoformat(timespec="seconds"),
        "stage": manifest.stage,
        "pending": [one.task_id for one in manifest.pending],
        "learned": metrics.get("images_per_class", {}),
        "edit": metrics.get("edit"),
        "accuracy": metrics.get("accuracy"),
        "novelty_auc": metrics.get("novelty_auc"),
        "threshold": manifest.threshold,
        "novel_above": manifest.novel_above,
        "keep": manifest.keep,
        "capacity": metrics.get("capacity", {}).get("used_max"),
    }
