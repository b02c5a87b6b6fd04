"""Learn a labelled batch in a data folder and publish the result as the next version.

**Killed at any moment, the current version stays whole; the same call resumes after the last finished epoch and ends
with the same bytes. A call that fails leaves the current version as it was and removes what it added.**

If classes are edited meanwhile, the result is published on the edited version, which has the parent's tensors. If a
version with other tensors becomes current, learning starts again on that version at once.
"""

import logging
import time
from collections.abc import Container, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np

from models import files
from models.errors import BackboneError, CorruptVersion, NothingLearned, StaleParent, StoreError
from models.inference.model import Model
from models.inference.runtime import Runtime
from models.inference.stored_model import new_tensors, read_model
from models.network.backbone import Backbone, open_backbone
from models.network.export import export, roles
from models.versions.class_ids import new_class_id, present_names, relabelled, samples_by_name
from models.versions.contents import HEADS, SAMPLES, Tensors
from models.versions.edits import label_of, unusable_labels
from models.versions.manifest import Manifest
from models.versions.store import VersionStore
from tasks.batch import LabelledBatch
from tasks.errors import BatchError
from tasks.images import FeatureCache, ImageStore
from trainer.data_folder import Rollback, Turn, check_disk_space, training_lock
from trainer.learning.checkpoint import Checkpoint
from trainer.learning.gate import Verdict
from trainer.learning.learner import Learned, Learner
from trainer.learning.memory import Samples, check_size, corrections, unseen
from trainer.learning.progress import Event, Listener, Progress
from trainer.learning.reproducibility import configure_torch, limit_threads, select_device
from trainer.learning.settings import LearnerSettings
from trainer.learning.tokens import TokenCache

log = logging.getLogger(__name__)

WORKING_SPACE = 64 * 2**20  # bytes for a task's checkpoints and its part of the next version
NEW_FOLDER_SPACE = 256 * 2**20  # bytes for the backbone and its graphs, if the size of the weights is not known

MACHINE_SETTINGS = {"backbone_weights", "device", "cache_bytes"}  # not recorded: they hold for one machine only
# Applied after training: a rejected task resumes from its checkpoint and is only evaluated again.
EVALUATION_SETTINGS = {"accept", "flag", "rule", "cascade", "gate_accuracy", "gate_auc"}


@dataclass(frozen=True)
class Outcome:
    """The result of a batch. The manifest of a rejected one has version 0."""

    state: Literal["published", "rejected", "already learned"]
    manifest: Manifest
    path: Path  # of the manifest
    verdict: Verdict | None = None  # None if the batch was learned before


@dataclass(frozen=True)
class Parent:
    """The version that the next one is built on; empty before the first version."""

    manifest: Manifest | None = None
    model: Model | None = None
    samples: Samples = field(default_factory=Samples)
    deleted: tuple[str, ...] = ()  # images that its samples named and that the image store no longer holds

    @classmethod
    def load(cls, store: VersionStore) -> Self:
        try:
            loaded = store.load()
        except NothingLearned:
            return cls()
        return cls(
            loaded.manifest, read_model(loaded)[0], Samples.from_json(samples_by_name(loaded.samples, loaded.manifest))
        )

    @property
    def version(self) -> int | None:
        return self.manifest.version if self.manifest else None

    def without_deleted(self, present: Container[str]) -> Self:
        """The parent without the images that people deleted from the image store."""
        samples = self.samples.without_missing(present)
        deleted = tuple(sorted(self.samples.keys - samples.keys))
        if deleted:
            log.warning("%d images of version %s were deleted: learning without them", len(deleted), self.version)
        return replace(self, samples=samples, deleted=deleted)


def learn_batch(
    root: Path,
    batch: LabelledBatch,
    settings: LearnerSettings,
    listener: Listener,
    *,
    images_stored: bool = False,
    submission: str | None = None,
    submitted_at: int | None = None,
    turn: Turn | None = None,
) -> Outcome:
    """Learn the batch as the next task of the data folder, and publish the version unless the gate rejects it.

    `images_stored`: the image store of `root` holds the batch's images already, so they are not read from the batch.
    `submission` is that of a task of the queue: it becomes at most one version, also if that is rolled back at once.
    `submitted_at` is the version that its labels refer to (`present_names`); by default the parent.
    `turn` is for a worker that holds the task's lease: see `training_lock`.
    """
    training = _Training(VersionStore(root), batch, settings, listener, images_stored, submission, submitted_at)
    if outcome := training.earlier_outcome():
        return outcome
    parent = training.checked_parent()
    rollback = Rollback(root)
    with training_lock(root, turn):
        try:
            while True:
                # Another version may have become current before the lock, or since the training started.
                if outcome := training.earlier_outcome():
                    return outcome
                if training.store.current() != parent.version:
                    parent = training.checked_parent()
                try:
                    return training.run(parent, rollback)
                except StaleParent as error:
                    log.info("learning task %s again: %s", batch.task_id, error)
        except Exception as error:
            # Not after Ctrl-C or a kill: the next call resumes from the images and the checkpoint.
            if training.find_version() is None:
                rollback.run()
                if isinstance(error, BatchError):  # no attempt can resume from these epochs
                    files.remove(training.checkpoint_folder)
            if isinstance(error, OSError):
                raise StoreError(f"the data folder {root} could not be used: {error}") from error
            raise


@dataclass(frozen=True)
class _Training:
    """One call of `learn_batch`."""

    store: VersionStore
    batch: LabelledBatch
    settings: LearnerSettings
    listener: Listener
    images_stored: bool
    submission: str | None
    submitted_at: int | None

    @property
    def checkpoint_folder(self) -> Path:
        return self.store.root / "work" / self.batch.task_id

    def find_version(self) -> int | None:
        return self.store.find_task(self.batch.task_id, self.submission)

    def earlier_outcome(self) -> Outcome | None:
        """The outcome if a version has learned the batch."""
        version = self.find_version()
        if version is None:
            return None
        files.remove(self.checkpoint_folder)  # left by an attempt that was killed right after publishing
        return Outcome("already learned", self.store.manifest(version), self.store.manifest_path(version))

    def images(self, parent: Parent) -> dict[str, list[str]]:
        """The keys of the batch's images by the present names of their classes, sorted by name."""
        manifest = parent.manifest
        present = present_names(self.store, manifest, self.batch.classes, self.submitted_at)
        # Images that were learned before their class was merged.
        merged = {
            (label_of(name, manifest.aliases), key)
            for name, keys in parent.samples.seen.items()
            if manifest is not None and name in manifest.aliases
            for key in keys
        }
        images: dict[str, list[str]] = {}
        for label, keys in self.batch.keys.items():
            images.setdefault(present[label], []).extend(key for key in keys if (present[label], key) not in merged)
        return dict(sorted(images.items()))

    def checked_parent(self) -> Parent:
        """Load the parent, and refuse a batch that cannot be learned on it before anything is written."""
        parent, batch, weights = Parent.load(self.store), self.batch, self.settings.backbone_weights
        images = self.images(parent)
        needed = WORKING_SPACE + (0 if self.images_stored else batch.total_bytes)
        if parent.manifest is not None:
            if problems := unusable_labels(parent.manifest, images):
                raise BatchError(problems)
            unseen(images, parent.samples)
            if corrected := corrections(images, parent.samples):
                log.warning("images that were learned under another label, and lose it: %d", len(corrected))
            # A task of about the size of the earlier ones, and the heads and samples of all.
            files = parent.manifest.files
            largest = max(entry.size for entry in files.values())
            needed += 2 * (largest + files[HEADS].size + files[SAMPLES].size)
        if weights is not None and not weights.is_file():
            raise BackboneError(f"no weights file at {weights}: check OPENWORLD_BACKBONE_WEIGHTS")
        check_size(parent.manifest.classes if parent.manifest else [], images, self.settings.replay_size)
        if not (self.store.root / "backbone.json").exists():
            # The weights, and at most twice in the graphs: `blocks` and `frozen` contain the adapted blocks.
            needed += 3 * weights.stat().st_size if weights else NEW_FOLDER_SPACE
        check_disk_space(self.store.root, needed)
        return parent

    def run(self, parent: Parent, rollback: Rollback) -> Outcome:
        started = time.monotonic()
        store, batch, settings = self.store, self.batch, self.settings
        for warning in batch.warnings(parent.manifest.classes if parent.manifest else []):
            log.warning("%s", warning)
        configure_torch(settings)
        backbone = open_backbone(store.root, settings.backbone, settings.backbone_weights, settings.adapted_blocks)
        used = backbone.spec.sha256
        if parent.manifest is not None and parent.manifest.backbone_sha256 != used:
            made_with = f"version {parent.version}: made with the backbone {parent.manifest.backbone_sha256}"
            raise CorruptVersion(f"{made_with}, but {used} is in use", "backbone")
        if not self.images_stored:
            for image in batch.images:
                rollback.put(image.sha256, batch.read)
        # Every version of a folder shares the graphs. Exported before the training, so that an error shows at once.
        graphs = parent.manifest.graphs if parent.manifest else {}
        if set(roles(backbone)) - graphs.keys():  # none yet, or those of an older release
            graphs = {role: store.add_graph(data) for role, data in export(backbone).items()}
        images = ImageStore(store.root)
        parent = parent.without_deleted(images)
        device = select_device(settings)
        learner = Learner(self._tokens(backbone, images, graphs, device), settings)
        batch_images = self.images(parent)
        checkpoint = Checkpoint(self.checkpoint_folder, self._fingerprint(parent, batch_images, device, backbone))
        progress = Progress(batch.task_id, self._stopping_when_stale(parent))
        learned = learner.learn(parent.model or learner.empty(), parent.samples, batch_images, checkpoint, progress)
        manifest = self._manifest(parent, batch_images, backbone, graphs, learned, time.monotonic() - started)
        tensors, stored = new_tensors(learned.model)
        manifest = manifest.model_copy(update={"files": stored})
        samples = relabelled(learned.samples.to_json(), manifest.id_of)
        verdict = learned.verdict
        if not verdict.accepted:
            path = store.reject(manifest, tensors, samples, "; ".join(verdict.reasons))
            return Outcome("rejected", manifest, path, verdict)
        manifest = self._publish(parent, manifest, tensors, samples)
        files.remove(self.checkpoint_folder)
        return Outcome("published", manifest, store.manifest_path(manifest.version), verdict)

    def _tokens(self, backbone: Backbone, images: ImageStore, graphs: Mapping[str, str], device: str) -> TokenCache:
        """On a CPU computed by ONNX Runtime, with the graphs that servers load."""
        store, settings = self.store, self.settings
        runtime = None
        if device == "cpu":
            paths = {role: store.graph_path(sha256) for role, sha256 in graphs.items()}
            runtime = Runtime(paths, "cpu", settings.threads)
            limit_threads(settings)  # a runtime limits BLAS to one thread, as a server needs it
        stored = FeatureCache(store.root, backbone.spec.sha256, images, settings.cache_bytes)
        return TokenCache(backbone, images.read, settings.seed, device, stored=stored, runtime=runtime)

    def _stopping_when_stale(self, parent: Parent) -> Listener:
        """The listener; StaleParent as soon as the result could not be published."""

        def listen(event: Event) -> None:
            self.listener(event)
            with suppress(CorruptVersion):  # may be repaired before the training ends
                self._same_tensors(parent)

        return listen

    def _same_tensors(self, parent: Parent) -> Manifest | None:
        """The current version if it is the parent or differs from it only by edits of classes; StaleParent if not."""
        if self.store.current() == parent.version:
            return parent.manifest
        current = self.store.current_manifest()
        if current is None or parent.manifest is None or current.files != parent.manifest.files:
            raise StaleParent(
                f"version {current.version if current else None} became current, and version {parent.version}, which "
                "the training started from, has other tensors"
            )
        return current

    def _publish(self, parent: Parent, learned: Manifest, tensors: Tensors, samples: Any) -> Manifest:
        """Publish on the current version, also if classes were edited since the training started."""
        while True:
            current = self._same_tensors(parent)
            manifest = learned if current is None or current.version == parent.version else _rebased(learned, current)
            try:
                return self.store.publish(manifest, tensors, samples)
            except StaleParent:
                log.info("another version was published before that of task %s", learned.task_id)

    def _fingerprint(
        self, parent: Parent, images: Mapping[str, list[str]], device: str, backbone: Backbone
    ) -> dict[str, Any]:
        """Everything that the weights depend on; the number of threads sets the order of floating-point sums."""
        files = {name: entry.sha256 for name, entry in parent.manifest.files.items()} if parent.manifest else {}
        return {
            "task": self.batch.task_id,
            "classes": list(images),  # renamed ones are split into training and held-out images in another way
            "parent": [files, parent.deleted],
            "settings": self.settings.model_dump(mode="json", exclude=MACHINE_SETTINGS | EVALUATION_SETTINGS),
            "device": device,
            "backbone": backbone.spec.sha256,
        }

    def _manifest(
        self,
        parent: Parent,
        images: Mapping[str, list[str]],
        backbone: Backbone,
        graphs: dict[str, str],
        learned: Learned,
        seconds: float,
    ) -> Manifest:
        model, spec = learned.model, backbone.spec
        tasks = [list(task.classes) for task in model.tasks]
        known = parent.manifest.class_ids if parent.manifest else []
        new_ids = [[new_class_id(self.batch.task_id, name) for name in names] for names in tasks[len(known) :]]
        threshold = float(model.novelty.threshold[0])
        return Manifest(
            parent=parent.version,
            task_id=self.batch.task_id,
            submission=self.submission,
            tasks=tasks,
            class_ids=[*known, *new_ids],
            aliases=dict(model.aliases),
            backbone=spec.to_dict(),
            backbone_sha256=spec.sha256,
            preprocessing_sha256=spec.preprocessing.sha256,
            graphs=graphs,
            rule=model.rule.to_dict(),
            threshold=threshold if np.isfinite(threshold) else None,
            novel_above=model.novelty.novel_above,
            metrics={
                **learned.verdict.to_dict(),
                "capacity": model.shared.capacity,
                "seconds": round(seconds, 3),
                "images": len(self.batch.images),
                "images_per_class": {name: len(keys) for name, keys in images.items() if keys},
            },
            settings=self.settings.model_dump(mode="json", exclude=MACHINE_SETTINGS),
            data_sha256=self.batch.sha256,
        )


def _rebased(learned: Manifest, current: Manifest) -> Manifest:
    """A manifest as if the classes had been edited after it was published; StaleParent if a new class has no name."""
    new = learned.tasks[len(current.tasks) :]
    if taken := {name for names in new for name in names} & set(current.classes):
        raise StaleParent(f"version {current.version} became current, and gave a class the name {min(taken)!r}")
    name_of = {learned.id_of[name]: name for names in new for name in names}
    name_of |= {id: name for name, id in current.id_of.items()}
    counts = {name_of[learned.id_of[name]]: count for name, count in learned.metrics["images_per_class"].items()}
    changes = {
        "parent": current.version,
        "tasks": [*current.tasks, *new],
        "aliases": current.aliases,
        # The advice is about the classes before the edit.
        "metrics": {**learned.metrics, "advice": None, "images_per_class": counts},
    }
    return learned.model_copy(update=changes)
