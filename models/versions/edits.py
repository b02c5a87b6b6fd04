"""Edits of classes: rename, merge, retire and restore. Each edit publishes a version without training.

An edit writes only a manifest, which names the contents of the parent. Merging and retiring add an
alias, which restoring removes; training continues with the classes as they were learned, so every edit can be undone.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from models.errors import ClassConflict, NothingLearned, UnknownClass
from models.versions.manifest import Manifest
from models.versions.promotions import Promoter
from models.versions.store import VersionStore

Kind = Literal["rename", "merge", "retire", "restore"]
Aliases = Mapping[str, str | None]  # merged class -> the class that it is merged into; retired class -> None


def label_of(name: str, aliases: Aliases) -> str | None:
    """The label that a class is answered as; None when it, or the class that it is merged into, is retired."""
    label: str | None = name
    while label is not None and label in aliases:
        label = aliases[label]
    return label


@dataclass(frozen=True)
class Edit:
    """A change of the class `name`; `to` is its new name, or the class that it is merged into."""

    kind: Kind
    name: str
    to: str | None = None

    @property
    def reason(self) -> str:
        """The description of the edit in the promotion log."""
        return {
            "rename": f"renamed {self.name} to {self.to}",
            "merge": f"merged {self.name} into {self.to}",
            "retire": f"retired {self.name}",
            "restore": f"restored {self.name}",
        }[self.kind]


def publish_edit(store: VersionStore, edit: Edit, by: Promoter, editor: str) -> Manifest:
    """Publish the current version with the edit applied; StaleParent when another version was published first."""
    parent = store.current_manifest()
    if parent is None:
        raise NothingLearned("there is no current version yet: submit a task first")
    return store.publish_edit(edited(parent, edit), by, f"{editor}: {edit.reason}")


def edited(parent: Manifest, edit: Edit) -> Manifest:
    """The manifest of the edited version; raises UnknownClass or ClassConflict."""
    _check(parent, edit)
    tasks, aliases = parent.tasks, dict(parent.aliases)
    if edit.kind == "restore":
        del aliases[edit.name]
    elif edit.kind == "rename":
        tasks = [[_renamed(name, edit) for name in names] for names in tasks]
        aliases = {name: to and _renamed(to, edit) for name, to in aliases.items()}
    else:  # `to` is None for a retired class
        aliases[edit.name] = edit.to
    changes = {
        "parent": parent.version,
        "submission": None,
        "task_id": f"edit-{datetime.now(UTC):%Y%m%d%H%M%S}-{secrets.token_hex(3)}",
        "tasks": tasks,
        "aliases": aliases,
        # The advice is about the classes before the edit.
        "metrics": {**parent.metrics, "advice": None, "images": 0, "images_per_class": {}, "edit": edit.reason},
        "created": datetime.now(UTC),
        "version": 0,
    }
    return parent.model_copy(update=changes)


def _check(parent: Manifest, edit: Edit) -> None:
    classes, active = parent.classes, parent.active_classes
    if edit.name not in classes:
        raise UnknownClass(f"there is no class {edit.name!r}: see GET /classes")
    if edit.kind == "restore" and edit.name in active:
        raise ClassConflict(f"{edit.name!r} is in use: there is nothing to restore")
    if edit.kind != "restore" and edit.name not in active:
        raise ClassConflict(f"{edit.name!r} is retired or merged: restore it first")
    if edit.kind == "merge" and edit.to not in classes:
        raise UnknownClass(f"there is no class {edit.to!r} to merge into")
    if edit.kind == "merge" and (edit.to not in active or edit.to == edit.name):
        raise ClassConflict(f"{edit.name!r} cannot be merged into {edit.to!r}: choose another class that is in use")
    if edit.kind == "rename" and edit.to in classes:
        raise ClassConflict(f"there is a class {edit.to!r} already: merge into it")


def unusable_labels(manifest: Manifest, labels: Collection[str]) -> list[str]:
    """One problem with its remedy per label that names a merged or retired class."""
    problems = []
    for name in sorted(set(labels) & set(manifest.aliases)):
        target = label_of(name, manifest.aliases)
        remedy = (
            f"is merged into {target!r}: use that label" if target else "is retired: restore it, or use another label"
        )
        problems.append(f"class {name!r} {remedy}")
    return problems


def _renamed(name: str, edit: Edit) -> str:
    return edit.to if name == edit.name and edit.to is not None else name
