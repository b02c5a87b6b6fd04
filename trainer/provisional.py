"""Provisional versions: new classes answer within seconds of their submission, before their task is learned.

**A provisional version is the learned version under it plus the images of its pending tasks, in closed form.** It names
the contents of the learned version and one of its own, so the learned version can be read from it unchanged: whichever
tasks are pending, a training starts from the same bytes. A pending task does not count as learned, so a kill between
both versions loses nothing.
"""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, NamedTuple

from models.errors import StaleParent
from models.inference.model import Model
from models.inference.stored_model import new_tensors
from models.versions.class_ids import relabelled
from models.versions.contents import Tensors
from models.versions.manifest import PendingTask
from tasks.errors import BatchError
from trainer.context import LearningContext
from trainer.learning.learner import Learner
from trainer.learning.memory import Samples
from trainer.learning.provisional import Images, ProvisionalModel, provisional_model
from trainer.parent import Parent, Submission

log = logging.getLogger(__name__)


def publish_pending(context: LearningContext, parent: Parent, submission: Submission) -> Parent:
    """Publish a version in which the submission is pending; returns it as the parent.

    The parent itself if the submission is pending there already, or if its classes cannot be known in closed form.
    StaleParent if a version with other learned tasks became current.
    """
    while True:
        parent = parent.refreshed(context.store).without_deleted(context.present())
        if parent.manifest is not None and parent.manifest.is_pending(submission.task_id, submission.id):
            return parent
        started = time.monotonic()
        images, learned = parent.images_of(submission, context.store), _learned(context, parent)
        pending = {**parent.pending_without(submission.task_id), submission.task_id: images}
        try:
            made = provisional_model(context.tokens, learned, parent.samples, pending, context.settings)
        except BatchError as error:  # the training reports it
            log.info("no provisional version of task %s: %s", submission.task_id, error)
            return parent
        if made.reasons:
            log.warning("no provisional version of task %s: %s", submission.task_id, "; ".join(made.reasons))
            return parent
        staged = _stage_of(made, parent, learned.rule.to_dict(), submission)
        metrics: dict[str, Any] = {
            "accepted": True,
            "tasks": [],
            "reasons": [],
            "advice": None,
            "accuracy": made.accuracy,
            "novelty_auc": made.novelty_auc,
            "drawn": made.drawn,
            "capacity": learned.shared.capacity,
            "seconds": round(time.monotonic() - started, 3),
            "images": len(submission.batch.images),
            "images_per_class": {name: len(keys) for name, keys in images.items() if keys},
        }
        heads, stored = new_tensors(learned)  # with the bytes that the store has already
        manifest = context.manifest(parent, submission, made.model, files=stored, metrics=metrics, **staged.fields)
        tensors = {**heads, **staged.tensors}
        reason = f"task {submission.task_id} answers before it is learned"
        context.store_features(made.samples)
        context.check_keep()
        try:
            context.store.publish(manifest, tensors, relabelled(made.samples.to_json(), manifest.id_of), reason=reason)
        except StaleParent:
            continue  # an edit came in between
        log.info("task %s answers before it is learned", submission.task_id)


class Dropped(NamedTuple):
    """A task that was pending, and the version without it."""

    task_id: str
    version: int
    note: str  # for people: what does not answer any more


def drop_pending(
    context: LearningContext, parent: Parent, task_id: str, reason: str = "it was cancelled"
) -> Dropped | None:
    """Publish a version without a task; None if it is not pending."""
    while True:
        parent = parent.refreshed(context.store).without_deleted(context.present())
        before = parent.manifest
        if before is None or not before.is_pending(task_id):
            return None
        note = note_of(parent, task_id)
        learned = _learned(context, parent)
        left = stage(context, parent, learned, parent.samples, parent.pending_without(task_id))
        heads, stored = new_tensors(learned)
        kept = {name for names in left.model.classes_by_task for name in names}
        manifest = before.model_copy(
            update={
                "parent": before.version,
                "task_id": f"without-{task_id}"[:128],
                "submission": None,
                "tasks": [list(names) for names in left.model.classes_by_task],
                "class_ids": [[before.id_of[name] for name in names] for names in left.model.classes_by_task],
                "aliases": {name: to for name, to in before.aliases.items() if name in kept},
                "rule": left.model.rule.to_dict(),
                "threshold": left.model.novelty.novel_below,
                "novel_above": left.model.novelty.novel_above,
                "stage": "refined",
                "pending": [],
                "refined_rule": None,
                **left.fields,
                "files": stored,
                "metrics": {**before.metrics, "advice": None, "images": 0, "images_per_class": {}, "edit": note},
                "created": datetime.now(UTC),
                "version": 0,
            }
        )
        samples = relabelled(left.samples.to_json(), manifest.id_of)
        context.store_features(left.samples)
        context.check_keep()
        try:
            why = f"task {task_id} does not answer any more: {reason}"
            manifest = context.store.publish(manifest, {**heads, **left.tensors}, samples, reason=why)
        except StaleParent:
            continue
        dropped = Dropped(task_id, manifest.version, note)
        log.warning("%s, and %s", why, dropped.note)
        context.discard(parent.samples.pending[task_id])
        return dropped


def note_of(parent: Parent, task_id: str) -> str:
    """What does not answer any more when a pending task of the parent is dropped."""
    images, learned = parent.samples.pending[task_id], parent.model.classes if parent.model else ()
    new = [name for name in images if name not in learned]
    parts = [f"classes that answered provisionally do not answer any more: {', '.join(new)}"] if new else []
    if known := [name for name in images if name in learned]:
        parts.append(f"further images of classes do not count any more: {', '.join(known)}")
    return "; ".join(parts)


@dataclass(frozen=True)
class Stage:
    """A learned model with the tasks that are still pending, if there are any, ready to be published."""

    model: Model
    samples: Samples
    tensors: Tensors  # beside those of the learned tasks
    fields: dict[str, Any]  # of the manifest


def stage(
    context: LearningContext, parent: Parent, model: Model, samples: Samples, pending: Mapping[str, Images]
) -> Stage:
    """A learned model with pending tasks; without them if they cannot be added to it: their own training will."""
    if pending:
        try:
            made = provisional_model(context.tokens, model, samples, pending, context.settings)
        except BatchError as error:
            log.info("publishing without the pending tasks: %s", error)
        else:
            if not made.reasons:
                return _stage_of(made, parent, model.rule.to_dict())
            log.warning("publishing without the pending tasks: %s", "; ".join(made.reasons))
    return Stage(model, replace(samples, pending={}), {}, {})


def _stage_of(
    made: ProvisionalModel, parent: Parent, learned_rule: dict[str, Any], submission: Submission | None = None
) -> Stage:
    known = {one.task_id: one for one in parent.manifest.pending} if parent.manifest else {}
    if submission is not None:
        known[submission.task_id] = PendingTask(task_id=submission.task_id, submission=submission.id)
    pending = [known[task] for task in made.samples.pending]
    fields = {"stage": "provisional", "pending": pending, "refined_rule": learned_rule}
    return Stage(made.model, made.samples, made.closed_form.tensors(made.model.novelty), fields)


def _learned(context: LearningContext, parent: Parent) -> Model:
    return parent.model or Learner(context.tokens, context.settings).empty()
