"""Learn a labelled batch in a data folder: publish its classes at once, in closed form, then what was learned.

**Killed at any moment, the current version stays whole; the same call resumes after the last finished epoch and ends
with the same bytes. A call that fails removes what it added, unless a provisional version answers with it already.**

If people edit classes during the training, or other tasks become pending, the result is published on the version that
is current at its end: the learned tasks of that version have the same bytes. Pending tasks that are cancelled during it
are dropped by a further version. If a version with other learned tasks becomes current, learning starts again on that
version at once; if it lacks the classes of this task, the training is dropped.
"""

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from models.errors import BackboneError, CorruptVersion, OpenWorldError, StaleParent, StoreError
from models.inference.stored_model import new_tensors
from models.storage import DataFolder, storage_of
from models.versions.backbone_spec import RECORD
from models.versions.class_ids import relabelled
from models.versions.contents import HEADS, SAMPLES
from models.versions.edits import unusable_labels
from models.versions.manifest import Manifest, PendingTask
from models.versions.reader import manifest_key
from models.versions.store import VersionStore
from tasks.batch import LabelledBatch
from tasks.errors import BatchError
from trainer.context import UNRECORDED_SETTINGS, LearningContext, backbone_of
from trainer.data_folder import Rollback, Turn, check_disk_space, keep_of, training_lock
from trainer.helpers import shared_with_helpers
from trainer.learning.checkpoint import Checkpoint, remove_checkpoint
from trainer.learning.gate import Verdict
from trainer.learning.learner import Learned, Learner
from trainer.learning.memory import check_size, corrections, unseen
from trainer.learning.progress import Listener, Progress
from trainer.learning.reproducibility import configure_torch
from trainer.learning.settings import LearnerSettings
from trainer.parent import Parent, Submission, named_as_in, with_method
from trainer.provisional import Dropped, Stage, drop_pending, publish_pending, stage

log = logging.getLogger(__name__)

WORKING_SPACE = 64 * 2**20  # bytes for a task's checkpoints and its part of the next version
NEW_FOLDER_SPACE = 256 * 2**20  # bytes for the backbone and its graphs, if the size of the weights is not known
RETRY = "retry the task to learn it"

# Applied after training: a rejected task resumes from its checkpoint and is only evaluated again.
EVALUATION_SETTINGS = {"accept", "flag", "rule", "rotations", "cascade", "gate_accuracy", "gate_auc"}

Waiting = Callable[[], Sequence[Submission]]  # what was submitted since the training began
Cancelled = Callable[[Sequence[PendingTask]], Collection[PendingTask]]  # those of the pending tasks that were cancelled


class RefinementDropped(OpenWorldError):
    """The classes of the task were answered provisionally, and another version took their place."""


@dataclass(frozen=True)
class Outcome:
    """The result of a batch. The manifest of a rejected one has version 0.

    Provisional: the gate rejected what was learned, and the classes answer in closed form, in the current version;
    `manifest` is that of the current version, `place` that of the rejected one.
    """

    state: Literal["published", "provisional", "rejected", "already learned"]
    manifest: Manifest
    place: str  # of the manifest
    verdict: Verdict | None = None  # None if the batch was learned before


def learn_batch(
    folder: DataFolder,
    batch: LabelledBatch,
    settings: LearnerSettings,
    listener: Listener,
    *,
    images_stored: bool = False,
    submission: str | None = None,
    submitted_at: int | None = None,
    turn: Turn | None = None,
    provisional: bool = False,
    waiting: Waiting = tuple,
    on_provisional: Callable[[Submission, int], None] = lambda submission, version: None,
    cancelled: Cancelled = lambda pending: (),
    on_dropped: Callable[[Dropped], None] = lambda dropped: None,
) -> Outcome:
    """Learn the batch as the next task of the data folder, and publish the version unless the gate rejects it.

    `images_stored`: the image store of the folder holds the batch's images, so they are not read from the batch.
    `submission` is that of a task of the queue: it becomes at most one learned version, also if that is rolled back at
    once. `submitted_at`: see `Submission`.
    `turn` is for a worker that holds the task's lease: see `training_lock`.
    `provisional`: publish a version in which the batch is pending first, and versions with those that are `waiting`.
    `on_provisional` gets each submission that is pending, with the version.
    `cancelled`: publish versions without these pending tasks. `on_dropped` gets each task that is not pending any more
    and was not learned, also this one if it is rejected.
    """
    submitted, storage = Submission(batch, submission, submitted_at), storage_of(folder)
    store = VersionStore(storage)
    settings = with_method(settings, store.current_manifest())
    training = _Training(
        *(store, submitted, settings, listener, images_stored),
        *(provisional, waiting, on_provisional, cancelled, on_dropped),
    )
    if outcome := training.earlier_outcome():
        return outcome
    parent = training.checked_parent()
    rollback = Rollback(storage)
    with training_lock(storage, turn):
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
            if training.find_version() is None and not training.is_pending():
                rollback.run()
                if isinstance(error, BatchError | RefinementDropped):  # no attempt can resume from these epochs
                    training.remove_checkpoint()
            if isinstance(error, OSError):
                raise StoreError(f"the data folder {storage.location('')} could not be used: {error}") from error
            raise


@dataclass(frozen=True)
class _Training:
    """One call of `learn_batch`."""

    store: VersionStore
    submission: Submission
    settings: LearnerSettings
    listener: Listener
    images_stored: bool
    provisional: bool
    waiting: Waiting
    on_provisional: Callable[[Submission, int], None]
    cancelled: Cancelled
    on_dropped: Callable[[Dropped], None]
    looked_at: set[str] = field(default_factory=set)  # submissions that are pending, or cannot be

    @property
    def batch(self) -> LabelledBatch:
        return self.submission.batch

    @property
    def makes_provisional(self) -> bool:
        return self.provisional and self.settings.weighs_frozen_evidence

    def remove_checkpoint(self) -> None:
        """Not needed any more. One that remains is removed by the next sweep of a worker."""
        with suppress(OSError):
            remove_checkpoint(self.store.storage, self.batch.task_id)

    def find_version(self) -> int | None:
        return self.store.find_task(self.batch.task_id, self.submission.id)

    def is_pending(self) -> bool:
        """Whether the current version answers with the classes of this task."""
        with suppress(CorruptVersion):
            current = self.store.current_manifest()
            return current is not None and current.is_pending(self.batch.task_id)
        return False

    def earlier_outcome(self) -> Outcome | None:
        """The outcome if a version has learned the batch."""
        version = self.find_version()
        if version is None:
            return None
        self.remove_checkpoint()  # left by an attempt that was killed right after publishing
        return Outcome("already learned", self.store.manifest(version), self._place_of(version))

    def _place_of(self, version: int) -> str:
        return self.store.storage.location(manifest_key(version))

    def checked_parent(self) -> Parent:
        """Load the parent, and refuse a batch that cannot be learned on it before anything is written."""
        parent, batch, weights = Parent.load(self.store), self.batch, self.settings.backbone_weights
        images = parent.images_of(self.submission, self.store)
        needed = WORKING_SPACE + (0 if self.images_stored else batch.total_bytes)
        if parent.manifest is not None:
            own = parent.samples.pending.get(batch.task_id, {})  # people may have edited these classes
            if problems := unusable_labels(parent.manifest, images.keys() - own.keys()):
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
        if self.store.storage.find(RECORD) is None:
            # The weights, and at most twice in the graphs: `blocks` and `frozen` contain the adapted blocks.
            needed += 3 * weights.stat().st_size if weights else NEW_FOLDER_SPACE
        check_disk_space(self.store.root, needed)
        return parent

    def run(self, parent: Parent, rollback: Rollback) -> Outcome:
        started = time.monotonic()
        for warning in self.batch.warnings(parent.manifest.classes if parent.manifest else []):
            log.warning("%s", warning)
        configure_torch(self.settings)
        keeps_images = keep_of(self.store.storage, self.settings) == "images"
        backbone = backbone_of(self.store, self.settings, parent.manifest)
        if keeps_images and not self.images_stored:
            for image in self.batch.images:
                rollback.put(image.sha256, self.batch.read)
        # Images that are not to be kept are not stored for the time of the training either.
        unstored = None if keeps_images or self.images_stored else self.batch
        rollback.read_unstored(image.sha256 for image in (unstored.images if unstored else ()))
        context = LearningContext.open(self.store, self.settings, backbone, parent.manifest, unstored)
        present = context.present()
        context.tokens.keep_only({key for key in parent.samples.keys if key in present})
        with shared_with_helpers(context):
            return self._learn(context, parent, started)

    def _learn(self, context: LearningContext, parent: Parent, started: float) -> Outcome:
        if self.makes_provisional:
            parent = self._publish_pending(context, parent, self.submission)
        parent = parent.without_deleted(context.present())
        pending = parent.manifest is not None and parent.manifest.is_pending(self.batch.task_id)
        learner, images = Learner(context.tokens, context.settings), parent.images_of(self.submission, self.store)
        fingerprint = self._fingerprint(parent, images, context)
        checkpoint = Checkpoint(self.store.storage, self.batch.task_id, fingerprint)
        progress = Progress(self.batch.task_id, self.listener, partial(self._look, context, parent, pending))
        try:
            learned = learner.learn(parent.model or learner.empty(), parent.samples, images, checkpoint, progress)
            outcome = self._publish(context, parent, learned, pending, images, started)
        except StaleParent as error:
            if pending and not self.is_pending():
                raise RefinementDropped(f"{error}; it does not have the classes of this task: {RETRY}") from error
            raise
        try:
            context.discard(images)
        except (OSError, StaleParent, StoreError) as error:  # the version is published; a trainer searches for the rest
            log.error("images or sums of task %s remain for now: %s", self.batch.task_id, error)
        return outcome

    def _look(self, context: LearningContext, parent: Parent, pending: bool) -> None:
        """Look at what happened outside; StaleParent or RefinementDropped if the result could not be published.

        Publishes provisional versions of tasks that were submitted during the training, and versions without those that
        were cancelled.
        """
        with suppress(CorruptVersion):  # may be repaired before the training ends
            current = parent.current_manifest(self.store)
            self._check_wanted(current, pending)
            for one in self.cancelled(current.pending if current else ()):
                self._drop_pending(context, parent, one.task_id, "it was cancelled")
            for submission in self.waiting() if self.makes_provisional else ():
                self._publish_pending(context, parent, submission)

    def _publish_pending(self, context: LearningContext, parent: Parent, submission: Submission) -> Parent:
        if submission.task_id in self.looked_at:
            return parent
        parent = publish_pending(context, parent, submission)
        self.looked_at.add(submission.task_id)  # once: one that cannot be pending would cost seconds at every look
        if parent.manifest is not None and parent.manifest.is_pending(submission.task_id, submission.id):
            self.on_provisional(submission, parent.manifest.version)
        return parent

    def _drop_pending(self, context: LearningContext, parent: Parent, task_id: str, reason: str) -> None:
        self.looked_at.discard(task_id)  # it may be submitted again
        if dropped := drop_pending(context, parent, task_id, reason):
            self.on_dropped(dropped)

    def _check_wanted(self, current: Manifest | None, pending: bool) -> None:
        if pending and not (current and current.is_pending(self.batch.task_id)):
            number = current.version if current else None
            raise RefinementDropped(
                f"version {number} became current, which does not have the classes of this task: {RETRY}"
            )

    def _publish(
        self,
        context: LearningContext,
        parent: Parent,
        learned: Learned,
        pending: bool,
        images: Mapping[str, list[str]],
        started: float,
    ) -> Outcome:
        """Publish on the current version, also if classes were edited, or tasks became pending, since the start."""
        verdict, task_id = learned.verdict, self.batch.task_id
        while True:
            now = parent.refreshed(self.store).without_deleted(context.present())
            self._check_wanted(now.manifest, pending)
            model, samples, renamed = named_as_in(now, parent, learned.model, learned.samples, task_id)
            left = Stage(model, samples, {}, {})
            if verdict.accepted:
                left = stage(context, now, model, samples, now.pending_without(task_id))
            metrics = {
                **verdict.to_dict(),
                # The advice is about the classes before an edit.
                **({"advice": None} if renamed or now.aliases != parent.aliases else {}),
                "capacity": model.shared.capacity,
                "seconds": round(time.monotonic() - started, 3),
                "images": len(self.batch.images),
                "images_per_class": {renamed.get(name, name): len(keys) for name, keys in images.items() if keys},
            }
            tensors, stored = new_tensors(model)
            manifest = context.manifest(now, self.submission, left.model, files=stored, metrics=metrics, **left.fields)
            tensors = {**tensors, **left.tensors}
            json_samples = relabelled(left.samples.to_json(), manifest.id_of)
            if not verdict.accepted:
                place = self.store.reject(manifest, tensors, json_samples, "; ".join(verdict.reasons))
                if pending and now.manifest is not None and context.keep != "statistics":
                    return Outcome("provisional", now.manifest, place, verdict)
                # Without images or features, later versions could not have its classes.
                self._drop_pending(context, now, task_id, "its result was rejected")
                return Outcome("rejected", manifest, place, verdict)
            context.store_features(left.samples)
            context.check_keep()
            try:
                manifest = self.store.publish(manifest, tensors, json_samples)
            except StaleParent:
                log.info("another version was published before that of task %s", task_id)
                if outcome := self.earlier_outcome():  # by another trainer, which took the task over
                    return outcome
                continue
            self.remove_checkpoint()
            return Outcome("published", manifest, self._place_of(manifest.version), verdict)

    def _fingerprint(self, parent: Parent, images: Mapping[str, list[str]], context: LearningContext) -> dict[str, Any]:
        """Everything that the weights depend on; the number of threads sets the order of floating-point sums."""
        return {
            "task": self.batch.task_id,
            "classes": list(images),  # renamed ones are split into training and held-out images in another way
            "parent": [{role: entry.sha256 for role, entry in parent.learned_files.items()}, parent.deleted],
            "settings": self.settings.model_dump(mode="json", exclude=UNRECORDED_SETTINGS | EVALUATION_SETTINGS),
            "device": context.device,
            "backbone": context.backbone.spec.sha256,
        }
