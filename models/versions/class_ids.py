"""Stable ids of classes. Names are in manifests only; samples are keyed by ids, so a rename changes no other file.

An id is made from the task that the class was first learned with and its name at that time: learning the batch again,
also after a roll back, gives the same ids, and no other class ever gets them.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from contextlib import suppress
from typing import Any

from models.errors import CorruptVersion
from models.files import sha256_bytes
from models.versions.edits import label_of
from models.versions.manifest import Manifest
from models.versions.store import VersionStore


def new_class_id(task_id: str, name: str) -> str:
    return f"{task_id}.{sha256_bytes(name.encode())[:8]}"


def samples_by_name(samples: Mapping[str, Any], manifest: Manifest) -> dict[str, Any]:
    """The samples of a version with the present names of its classes, sorted by name."""
    return relabelled(samples, {id: name for name, id in manifest.id_of.items()})


def relabelled(samples: Mapping[str, Any], labels: Mapping[str, str]) -> dict[str, Any]:
    """Samples (trainer/learning/memory.py) under other labels: ids for names, or names for ids."""
    return {
        **samples,
        "memory": dict(sorted((labels[label], keys) for label, keys in samples["memory"].items())),
        "seen": dict(sorted((labels[label], keys) for label, keys in samples["seen"].items())),
        "held_out": [{**row, "label": labels[row["label"]]} for row in samples["held_out"]],
        "pending": {
            task: dict(sorted((labels[label], keys) for label, keys in images.items()))
            for task, images in samples.get("pending", {}).items()
        },
    }


def learned_labels(samples: Mapping[str, Any], manifest: Manifest, keys: Container[str]) -> dict[str, str]:
    """The labels that a version has learned for these images, or has pending: that of a merged class is its target's.

    Images that it does not know are left out.
    """
    named = samples_by_name(samples, manifest)
    return {
        key: label_of(name, manifest.aliases) or name
        for images in (named["seen"], *named["pending"].values())
        for name, own in images.items()
        for key in own
        if key in keys
    }


def changed_labels(answered: Manifest, present: Manifest) -> dict[str, str]:
    """The present label of each class of an earlier version that is renamed or merged since."""
    name_of = {id: name for name, id in present.id_of.items()}
    labels: dict[str, str] = {}
    for name, id in answered.id_of.items():
        if (now := name_of.get(id)) is not None:  # a version after a roll back may not have it
            labels[name] = label_of(now, present.aliases) or now
    return {name: label for name, label in labels.items() if label != name}


def present_names(
    store: VersionStore, parent: Manifest | None, labels: Iterable[str], submitted_at: int | None
) -> dict[str, str]:
    """The name under which each label of a batch is learned on `parent`: renames and merges apply to queued tasks.

    A label means the class that had this name in version `submitted_at`, which was current when the batch was submitted
    (0: there was none), or else the first class that got the name since. A label that never named a class of the parent
    is a new class. Without `submitted_at` labels are the parent's names.
    """
    if parent is None or submitted_at is None or submitted_at == parent.version:
        return {label: label for label in labels}
    since = [n for n in reversed(store.lineage(parent.version)) if n > submitted_at]
    ids: dict[str, str] = {}
    for n in [submitted_at, *since] if submitted_at else since:
        with suppress(CorruptVersion):
            ids = store.manifest(n).id_of | ids
    name_of = {id: name for name, id in parent.id_of.items()}
    present: dict[str, str] = {}
    for label in labels:
        name = name_of.get(ids.get(label, ""), label)
        present[label] = label_of(name, parent.aliases) or name  # a retired class: its name, which is refused later
    return present
