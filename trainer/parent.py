"""The version that a training builds on, and how its result fits the version that is current when it ends."""

import logging
from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from cachetools import LRUCache

from models.errors import CorruptVersion, MethodError, NothingLearned, StaleParent
from models.inference.model import Model
from models.inference.stored_model import contents_of, read_model
from models.versions.class_ids import new_class_id, present_names, relabelled, samples_by_name
from models.versions.contents import PROVISIONAL, SAMPLES
from models.versions.edits import label_of
from models.versions.manifest import FileEntry, Manifest
from models.versions.store import VersionStore
from tasks.batch import LabelledBatch
from trainer.learning.memory import Samples
from trainer.learning.settings import DEFAULT_METHOD, LearnerSettings

log = logging.getLogger(__name__)

METHOD_SETTING = "OPENWORLD_TRAIN_METHOD"

# Of one data folder at a time: people wait for the provisional version of the next task.
_last_read: LRUCache[Path, Model] = LRUCache(1)


@dataclass(frozen=True)
class Submission:
    """A labelled batch, and where it comes from."""

    batch: LabelledBatch
    id: str | None = None  # of a task of the queue
    submitted_at: int | None = None  # the version that its labels refer to (`present_names`); by default the parent

    @property
    def task_id(self) -> str:
        return self.batch.task_id


@dataclass(frozen=True)
class Parent:
    """The current version, with the names that its classes have now; empty before the first version."""

    manifest: Manifest | None = None
    model: Model | None = None  # of its learned tasks; None if there are none
    samples: Samples = field(default_factory=Samples)
    deleted: tuple[str, ...] = ()  # learned images that the samples named and that the image store no longer holds

    @classmethod
    def load(cls, store: VersionStore) -> Self:
        """The current version; of its tasks only those are read that the parent before it did not have."""
        last = _last_read.get(store.root)
        try:
            loaded = store.load(skip=contents_of(last))
        except NothingLearned:
            return cls()
        model = read_model(loaded, last)[0]
        _last_read[store.root] = model
        samples = Samples.from_json(samples_by_name(loaded.samples, loaded.manifest))
        return cls(loaded.manifest, model if model.tasks else None, samples)

    @property
    def version(self) -> int | None:
        return self.manifest.version if self.manifest else None

    @property
    def learned_files(self) -> dict[str, FileEntry]:
        """The contents of the learned tasks. Edits of classes, and pending tasks, leave them as they are."""
        return learned_files(self.manifest)

    @property
    def aliases(self) -> Mapping[str, str | None]:
        return self.manifest.aliases if self.manifest else {}

    def current_manifest(self, store: VersionStore) -> Manifest | None:
        """That of the version that is current now, if it has the same learned tasks; StaleParent if not."""
        if store.current() == self.version:
            return self.manifest
        current = store.current_manifest()
        if current is None or learned_files(current) != self.learned_files:
            raise StaleParent(
                f"version {current.version if current else None} became current, and version {self.version}, which "
                "the training started from, has other tensors"
            )
        return current

    def refreshed(self, store: VersionStore) -> Self:
        """The version that is current now, if it has the same learned tasks; StaleParent if not."""
        current = self.current_manifest(store)
        if current is None or current is self.manifest:
            return self
        samples = Samples.from_json(samples_by_name(store.samples(current.version, current), current))
        model = self.model and _renamed(self.model, current)
        return replace(self, manifest=current, model=model, samples=samples)

    def without_deleted(self, present: Container[str]) -> Self:
        """The parent without the images that people deleted from the image store."""
        samples = self.samples.without_missing(present)
        deleted = tuple(sorted(self.samples.learned_keys - samples.learned_keys))
        if deleted:
            log.warning("%d images of version %s were deleted: learning without them", len(deleted), self.version)
        return replace(self, samples=samples, deleted=deleted)

    def images_of(self, submission: Submission, store: VersionStore) -> dict[str, list[str]]:
        """The keys of a batch's images by the present names of their classes, sorted by name."""
        manifest, batch = self.manifest, submission.batch
        present = present_names(store, manifest, batch.classes, submission.submitted_at)
        # Images that were learned before their class was merged.
        merged = {
            (label_of(name, manifest.aliases), key)
            for name, keys in self.samples.seen.items()
            if manifest is not None and name in manifest.aliases
            for key in keys
        }
        images: dict[str, list[str]] = {}
        for label, keys in batch.keys.items():
            images.setdefault(present[label], []).extend(key for key in keys if (present[label], key) not in merged)
        return dict(sorted(images.items()))

    def pending_without(self, task_id: str) -> dict[str, Mapping[str, tuple[str, ...]]]:
        """The images of the pending tasks, without one of them; tasks whose images were all deleted are left out."""
        return {
            task: {name: keys for name, keys in images.items() if keys}
            for task, images in self.samples.pending.items()
            if task != task_id and any(images.values())
        }


def with_method(settings: LearnerSettings, current: Manifest | None) -> LearnerSettings:
    """The settings with the method of the data folder: that of its versions, or the chosen one before the first.

    MethodError if another one is set: the tasks of one model have the same kind of heads.
    """
    recorded = current and (current.settings.get("method") or DEFAULT_METHOD)  # older releases had one method
    if recorded and settings.method not in (None, recorded):
        raise MethodError(
            f"the versions of this data folder were learned with {recorded}, but {METHOD_SETTING} is "
            f"{settings.method}: unset {METHOD_SETTING}, or use a new data folder"
        )
    return settings.model_copy(update={"method": recorded or settings.method or DEFAULT_METHOD})


def learned_files(manifest: Manifest | None) -> dict[str, FileEntry]:
    files = manifest.files if manifest else {}
    return {role: entry for role, entry in files.items() if role not in (PROVISIONAL, SAMPLES)}


def _renamed(model: Model, manifest: Manifest) -> Model:
    """The model with the names of a version that has the same learned tasks."""
    if len(model.tasks) > len(manifest.tasks):
        raise CorruptVersion(f"version {manifest.version}: its manifest names contents of another number of tasks")
    tasks = tuple(replace(task, classes=tuple(manifest.tasks[k])) for k, task in enumerate(model.tasks))
    known = {name for task in tasks for name in task.classes}
    return replace(model, tasks=tasks, aliases={name: to for name, to in manifest.aliases.items() if name in known})


def named_as_in(
    now: Parent, parent: Parent, model: Model, samples: Samples, task_id: str
) -> tuple[Model, Samples, dict[str, str]]:
    """The result with the names that the classes have now, and the new name of each class that has another one.

    StaleParent if a new class has no name: an edit gave it to another class.
    """
    before = parent.manifest
    ids = {name: new_class_id(task_id, name) for name in model.classes} | (before.id_of if before else {})
    name_now = {id: name for name, id in now.manifest.id_of.items()} if now.manifest else {}
    name_of = {name: name_now.get(ids[name], name) for name in model.classes}
    if len({*name_of.values()}) < len(name_of):
        raise StaleParent(f"version {now.version} became current, and gave the name of a new class to another class")
    renamed = {name: to for name, to in name_of.items() if name != to}
    if not renamed:
        return model, samples, {}
    tasks = tuple(replace(task, classes=tuple(name_of[name] for name in task.classes)) for task in model.tasks)
    aliases = {name_of[name]: to and name_of.get(to, to) for name, to in model.aliases.items()}
    samples = Samples.from_json(relabelled(samples.to_json(), name_of))
    return replace(model, tasks=tasks, aliases=aliases), samples, renamed
