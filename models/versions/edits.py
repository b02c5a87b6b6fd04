"""People mislabel: rename a class, merge it into another, retire it, restore it. Each is a version without training.

Only what people see changes: the tensors are the parent's, byte for byte. A rename is a new name everywhere; merging
and retiring are aliases (`models/aliases.py`), which restoring takes away.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from models.errors import ClassConflict, UnknownClass
from models.versions.aliases import label_of
from models.versions.manifest import Manifest
from models.versions.store import By, LoadedVersion, VersionStore

Kind = Literal["rename", "merge", "retire", "restore"]


@dataclass(frozen=True)
class Edit:
    """What to do with the class `name`; `to` is its new name, or the class that it goes into."""

    kind: Kind
    name: str
    to: str | None = None

    @property
    def reason(self) -> str:
        """For the history."""
        what = {"rename": "renamed", "merge": "merged", "retire": "retired", "restore": "restored"}[self.kind]
        goal = {"rename": f" to {self.to}", "merge": f" into {self.to}"}.get(self.kind, "")
        return f"{what} {self.name}{goal}"


def publish_edit(store: VersionStore, edit: Edit, by: By, who: str) -> Manifest:
    """The current version with the edit, as the next version. StaleParent when somebody else published meanwhile."""
    loaded = store.load()
    manifest, samples = edited(loaded, edit)
    return store.publish(manifest, loaded.tensors, samples, by=by, reason=f"{who}: {edit.reason}")


def edited(loaded: LoadedVersion, edit: Edit) -> tuple[Manifest, Any]:
    """The manifest and the samples of the edited version."""
    parent, samples = loaded.manifest, loaded.samples
    classes, aliases = parent.classes, dict(parent.aliases)
    tasks = parent.tasks
    _require(edit.name in classes, UnknownClass(f"there is no class {edit.name!r}: see GET /classes"))
    active = [name for name in classes if name not in aliases]
    if edit.kind == "restore":
        _require(edit.name in aliases, ClassConflict(f"{edit.name!r} is in use: there is nothing to restore"))
        del aliases[edit.name]
    else:
        _require(edit.name in active, ClassConflict(f"{edit.name!r} is retired or merged: restore it first"))
        if edit.kind == "retire":
            aliases[edit.name] = None
        elif edit.kind == "merge":
            _require(edit.to in classes, UnknownClass(f"there is no class {edit.to!r} to merge into"))
            _require(
                edit.to in active and edit.to != edit.name, ClassConflict(f"merge into another class than {edit.to!r}")
            )
            aliases[edit.name] = edit.to
        else:
            assert edit.to is not None
            _require(edit.to not in classes, ClassConflict(f"there is a class {edit.to!r} already: merge into it"))
            tasks = [[_renamed(name, edit) for name in names] for names in tasks]
            aliases = {name: to and _renamed(to, edit) for name, to in aliases.items()}
            samples = _renamed_samples(samples, edit)
    metrics = {**parent.metrics, "images": 0, "images_per_class": {}, "edit": edit.reason}
    changes = {
        "parent": parent.version,
        "task_id": f"edit-{datetime.now(UTC):%Y%m%d%H%M%S}-{secrets.token_hex(3)}",
        "tasks": tasks,
        "aliases": aliases,
        "metrics": metrics,
        "created": datetime.now(UTC),
        "version": 0,
        "files": {},
    }
    return parent.model_copy(update=changes), samples


def active_classes(manifest: Manifest) -> list[str]:
    """What a version can answer, and what a batch may extend."""
    return [name for name in manifest.classes if name not in manifest.aliases]


def unusable(manifest: Manifest, labels: Collection[str]) -> list[str]:
    """Labels of a batch that name a class which people have merged or retired, a line each with its remedy."""
    problems = []
    for name in sorted(set(labels) & set(manifest.aliases)):
        goal = label_of(name, manifest.aliases)
        remedy = (
            f"was merged into {goal!r}: label these images so"
            if goal
            else "is retired: restore it, or choose another name"
        )
        problems.append(f"class {name!r} {remedy}")
    return problems


def _require(condition: bool, error: Exception) -> None:
    if not condition:
        raise error


def _renamed(name: str, edit: Edit) -> str:
    return edit.to if name == edit.name and edit.to is not None else name


def _renamed_samples(samples: dict[str, Any], edit: Edit) -> dict[str, Any]:
    """The images that a version keeps, under the new name (`trainer/memory.py` reads them)."""
    return {
        **samples,
        "memory": {_renamed(name, edit): keys for name, keys in samples["memory"].items()},
        "seen": {_renamed(name, edit): keys for name, keys in samples["seen"].items()},
        "held_out": [{**row, "label": _renamed(row["label"], edit)} for row in samples["held_out"]],
    }
