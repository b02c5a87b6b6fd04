"""Checks of the queue: every accepted task ended exactly once, or still waits, and agrees with the versions."""

from __future__ import annotations

from collections.abc import Iterator

from models.errors import CorruptVersion
from models.storage import Storage
from models.versions.manifest import Manifest
from models.versions.store import VersionStore
from openworld.check.report import Finding, Report
from openworld.check.versions import current_or_none
from tasks.errors import UnknownTask
from tasks.queue import TaskQueue, TaskSummary

_MEANING = {
    "entry_without_task": "the stream has the entry {detail} of a task that does not exist or is at another entry",
    "task_without_record": "the index names the task, and it has no record or an unknown state {detail}",
    "task_lost": "the task is {detail}, but no worker will get it: submit the batch again",
    "task_queued_twice": "the task is {detail} and is in the stream more than once",
    "task_ended_and_queued": "the task is {detail}, and both in the stream and among the ended ones",
    "task_not_indexed": "the task has ended and is missing in an index",
}


def check_queue(storage: Storage, queue: TaskQueue, report: Report) -> Iterator[Finding]:
    for code, id, detail in queue.contradictions():
        yield Finding(code, f"task {id}", _MEANING[code].format(detail=detail or "(none)"))
    tasks = queue.list_tasks(limit=None)
    report.checked["tasks"] = len(tasks)
    yield from _check_outcomes(VersionStore(storage), queue, tasks)


def _check_outcomes(store: VersionStore, queue: TaskQueue, tasks: list[TaskSummary]) -> Iterator[Finding]:
    """A published task has its version; a version in use is not that of a task that was reported as not learned."""
    manifests: dict[int, Manifest] = {}
    for n in store.versions():
        try:
            manifests[n] = store.manifest(n)
        except CorruptVersion:
            continue  # reported by the check of versions
    # The parents of a version are never pruned: the check of versions reports those that are missing.
    pruned = {line.version for line in store.log()} - set(store.versions())
    current, learned = current_or_none(store), dict[str, Manifest]()
    while current in manifests:
        manifest = manifests[current]
        if manifest.has_learned(manifest.task_id):
            learned[manifest.task_id] = manifest
        current = manifest.parent
    for task in tasks:
        if task.state == "published":
            made = manifests.get(task.version or 0)
            if made is None and task.version in pruned:
                continue
            if made is None or not (made.has_learned(task.id) or made.is_pending(task.id)):
                message = f"it is published as version {task.version}, which is not its version or is damaged"
                yield Finding("version_missing", f"task {task.id}", message)
        elif task.ended and task.id in learned and learned[task.id].submission == _submission(queue, task.id):
            message = (
                f"it is {task.state}, but the current version has learned it in version {learned[task.id].version}"
            )
            yield Finding("outcome_disagrees", f"task {task.id}", message)


def _submission(queue: TaskQueue, id: str) -> str | None:
    try:
        return queue.get(id).submission
    except UnknownTask:  # deleted from the history since
        return None
