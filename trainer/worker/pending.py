"""Provisional versions without a training: of tasks that wait while refinement is paused, and without ended ones.

A cancelled task is dropped from the current version. In a folder that keeps statistics, so is a failed or rejected one:
its images are gone, so that later versions could not have its classes.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress

from models.errors import OpenWorldError, StoreError
from models.storage import DataFolder, storage_of
from models.versions.keep import recorded_keep
from models.versions.manifest import Manifest
from models.versions.store import VersionStore
from tasks.batch import LabelledBatch, LabelledImage
from tasks.errors import UnknownTask
from tasks.images import ImageStore
from tasks.queue import Task, TaskQueue, TaskState
from trainer.context import LearningContext, backbone_of
from trainer.data_folder import training_lock
from trainer.learning.reproducibility import configure_torch
from trainer.learning.settings import LearnerSettings
from trainer.parent import Parent, Submission
from trainer.provisional import drop_pending, note_of, publish_pending

log = logging.getLogger(__name__)

CANCELLED: dict[TaskState, str] = {"cancelled": "it was cancelled"}
NOT_LEARNED: dict[TaskState, str] = {**CANCELLED, "failed": "it failed", "rejected": "its result was rejected"}


class PendingTasks:
    """The pending tasks of a data folder, kept in step with the queue. `announce` gets every new version."""

    def __init__(
        self, folder: DataFolder, queue: TaskQueue, settings: LearnerSettings, announce: Callable[[int], None]
    ) -> None:
        self._storage, self._queue, self._settings, self._announce = storage_of(folder), queue, settings, announce
        self._waiting: list[Task] = []  # those that are pending, or cannot be

    def publish_waiting(self) -> None:
        """Publish provisional versions of the tasks that wait."""
        before, self._waiting = self._waiting, self._queue.waiting(known=self._waiting)
        if tasks := [task for task in self._waiting if task not in before]:
            self._change(submissions_of(self._storage, tasks), {})

    def drop_ended(self) -> None:
        """Publish a version without the tasks that were cancelled or, where they cannot be kept, not learned."""
        current, dropped = self._current(), dict[str, TaskState]()
        for one in current.pending if current else ():
            with suppress(UnknownTask):  # not of this queue, or no longer in its history
                dropped[one.task_id] = self._queue.summary(one.task_id).state
        reasons = NOT_LEARNED if dropped and recorded_keep(self._storage) == "statistics" else CANCELLED
        if dropped := {id: state for id, state in dropped.items() if state in reasons}:
            self._change([], dropped)

    def _current(self) -> Manifest | None:
        with suppress(StoreError):  # damaged: the training reports it
            return VersionStore(self._storage).current_manifest()
        return None

    def _change(self, added: Sequence[Submission], dropped: Mapping[str, TaskState]) -> None:
        store = VersionStore(self._storage)
        try:
            with training_lock(self._storage):
                parent = Parent.load(store)
                configure_torch(self._settings)
                backbone = backbone_of(store, self._settings, parent.manifest)
                context = LearningContext.open(store, self._settings, backbone, parent.manifest)
                for submission in added:
                    parent = publish_pending(context, parent, submission)
                    if parent.manifest is not None and parent.manifest.is_pending(submission.task_id):
                        self._queue.record_provisional(submission.task_id, parent.manifest.version, submission.id)
                for task_id, state in dropped.items():
                    if parent.manifest is None or not parent.manifest.is_pending(task_id):
                        continue  # another trainer was faster
                    if state != "cancelled":  # noted before: after a kill in between, the task is still pending
                        self._queue.add_note(task_id, note_of(parent, task_id))
                    drop_pending(context, parent, task_id, NOT_LEARNED[state])
        except OpenWorldError as error:
            log.warning("the pending tasks could not be changed: %s", error)
        except OSError as error:
            log.warning("the pending tasks could not be changed, the data folder cannot be used: %s", error)
        current = self._current()
        if current is not None:
            self._announce(current.version)


def submissions_of(folder: DataFolder, tasks: Iterable[Task]) -> list[Submission]:
    """The batches of tasks; without damaged ones, whose own training reports it."""
    found = []
    for task in tasks:
        with suppress(StoreError):
            found.append(submission_of(folder, task))
    return found


def submission_of(folder: DataFolder, task: Task) -> Submission:
    """The batch of a task, whose images are in the image store."""
    images = tuple(
        LabelledImage(sha, name, f"image {sha[:12]}")
        for name, keys in sorted(task.classes.items())
        for sha in sorted(keys)
    )
    batch = LabelledBatch(images, ImageStore(folder).read, task.duplicates)
    if batch.sha256 != task.batch_sha256:
        raise StoreError(f"the images of task {task.id} are not those that were submitted: submit the batch again")
    return Submission(batch, task.submission, task.submitted_at)
