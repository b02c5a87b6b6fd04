"""Learn a labelled batch in a data folder and publish the result as the next version.

**Killed at any moment, the current version stays whole; the same call resumes after the last finished epoch and ends
with the same bytes. A call that fails leaves the current version as it was and removes what it added.**
"""

import logging
import time
from collections.abc import Container
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np

from models import files
from models.errors import BackboneError, CorruptVersion, NothingLearned, StaleParent, StoreError
from models.inference.model import Model, read_model
from models.network.backbone import Backbone, open_backbone
from models.network.export import export
from models.versions.edits import unusable_labels
from models.versions.manifest import Manifest
from models.versions.store import VersionStore
from tasks.batch import LabelledBatch
from tasks.errors import BatchError
from tasks.images import ImageStore
from trainer.data_folder import Rollback, check_disk_space, training_lock
from trainer.learning.checkpoint import Checkpoint
from trainer.learning.gate import Verdict
from trainer.learning.learner import Learned, Learner
from trainer.learning.memory import Samples, check_size, unseen
from trainer.learning.progress import Listener, Progress
from trainer.learning.reproducibility import configure_torch, select_device
from trainer.learning.settings import LearnerSettings
from trainer.learning.tokens import TokenCache

log = logging.getLogger(__name__)

WORKING_SPACE = 64 * 2**20  # bytes for a task's checkpoints and its part of the next version
NEW_FOLDER_SPACE = 256 * 2**20  # bytes for the backbone and its graphs, if the size of the weights is not known

MACHINE_SETTINGS = {"backbone_weights", "device"}  # not recorded: they hold for one machine only
# Applied after training: a rejected task resumes from its checkpoint and is only evaluated again.
EVALUATION_SETTINGS = {"accept", "flag", "rule", "gate_accuracy", "gate_auc"}


@dataclass(frozen=True)
class Outcome:
    """The result of a batch. The manifest of a rejected one has version 0."""

    state: Literal["published", "rejected", "already learned"]
    manifest: Manifest
    folder: Path
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
        return cls(loaded.manifest, read_model(loaded)[0], Samples.from_json(loaded.samples))

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
    lock_timeout: float | None = None,
) -> Outcome:
    """Learn the batch as the next task of the data folder, and publish the version unless the gate rejects it.

    `images_stored`: the image store of `root` holds the batch's images already, so they are not read from the batch.
    `lock_timeout` is for a worker that holds the task's lease: see `training_lock`.
    """
    training = _Training(VersionStore(root), batch, settings, listener, images_stored)
    if outcome := training.earlier_outcome():
        return outcome
    parent = training.checked_parent()
    rollback = Rollback(root)
    with training_lock(root, lock_timeout):
        # Another process may have published while this one waited for the lock.
        if outcome := training.earlier_outcome():
            return outcome
        if training.store.current() != parent.version:
            parent = training.checked_parent()
        try:
            return training.run(parent, rollback)
        except Exception as error:
            # Not after Ctrl-C or a kill: the next call resumes from the images and the checkpoint.
            if training.store.find_task(batch.task_id) is None:
                rollback.run()
                if isinstance(error, StaleParent | BatchError):  # no attempt can resume from these epochs
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

    @property
    def checkpoint_folder(self) -> Path:
        return self.store.root / "work" / self.batch.task_id

    def earlier_outcome(self) -> Outcome | None:
        """The outcome if a version has learned the batch."""
        version = self.store.find_task(self.batch.task_id)
        if version is None:
            return None
        files.remove(self.checkpoint_folder)  # left by an attempt that was killed right after publishing
        return Outcome("already learned", self.store.manifest(version), self.store.folder(version))

    def checked_parent(self) -> Parent:
        """Load the parent, and refuse a batch that cannot be learned on it before anything is written."""
        parent, batch, weights = Parent.load(self.store), self.batch, self.settings.backbone_weights
        needed = WORKING_SPACE + (0 if self.images_stored else batch.total_bytes)
        if parent.manifest is not None:
            if problems := unusable_labels(parent.manifest, batch.classes):
                raise BatchError(problems)
            unseen(batch.keys, parent.samples, {image.sha256: image.origin for image in batch.images})
            needed += 2 * sum(entry.size for entry in parent.manifest.files.values())
        if weights is not None and not weights.is_file():
            raise BackboneError(f"no weights file at {weights}: check OPENWORLD_BACKBONE_WEIGHTS")
        check_size(parent.manifest.classes if parent.manifest else [], batch.classes, self.settings.replay_size)
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
        graphs = graphs or {role: store.add_graph(data) for role, data in export(backbone).items()}
        images = ImageStore(store.root)
        parent = parent.without_deleted(images)
        device = select_device(settings)
        learner = Learner(TokenCache(backbone, images.read, settings.seed, device), settings)
        checkpoint = Checkpoint(self.checkpoint_folder, self._fingerprint(parent, device, backbone))
        progress = Progress(batch.task_id, self.listener)
        learned = learner.learn(parent.model or learner.empty(), parent.samples, batch.keys, checkpoint, progress)
        manifest = self._manifest(parent, backbone, graphs, learned, time.monotonic() - started)
        tensors, samples, verdict = learned.model.tensors(), learned.samples.to_json(), learned.verdict
        if not verdict.accepted:
            folder = store.reject(manifest, tensors, samples, "; ".join(verdict.reasons))
            return Outcome("rejected", manifest, folder, verdict)
        manifest = store.publish(manifest, tensors, samples)
        for path in self.checkpoint_folder.parent.iterdir():  # no attempt can resume from epochs on an older parent
            if path.is_dir():
                files.remove(path)
        return Outcome("published", manifest, store.folder(manifest.version), verdict)

    def _fingerprint(self, parent: Parent, device: str, backbone: Backbone) -> dict[str, Any]:
        """Everything that the weights depend on; the number of threads sets the order of floating-point sums."""
        return {
            "task": self.batch.task_id,
            "parent": [parent.version, parent.manifest.task_id if parent.manifest else None, parent.deleted],
            "settings": self.settings.model_dump(mode="json", exclude=MACHINE_SETTINGS | EVALUATION_SETTINGS),
            "device": device,
            "backbone": backbone.spec.sha256,
        }

    def _manifest(
        self, parent: Parent, backbone: Backbone, graphs: dict[str, str], learned: Learned, seconds: float
    ) -> Manifest:
        model, spec = learned.model, backbone.spec
        threshold = float(model.novelty.threshold[0])
        return Manifest(
            parent=parent.version,
            task_id=self.batch.task_id,
            tasks=[list(task.classes) for task in model.tasks],
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
                "images_per_class": self.batch.counts,
            },
            settings=self.settings.model_dump(mode="json", exclude=MACHINE_SETTINGS),
            data_sha256=self.batch.sha256,
        )
