"""A task as the fields of a Redis hash and back. Text only, each value by itself, so that Lua changes one at a time."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import to_json

from tasks.queue.task import Task, TaskProgress, TaskSummary

LONGEST_REASON = 4000
# Of a summary: everything but the names of the images.
SUMMARY_FIELDS = (
    *("id", "state", "created", "updated", "submitted_by", "batch_sha256", "duplicates", "attempts", "cancel"),
    *("progress", "version", "reason", "result", "counts"),
)


def fields_of(task: Task) -> dict[str, str]:
    """What a submission writes; the rest of the record is the queue's."""
    return {
        "id": task.id,
        "created": task.created.isoformat(),
        "submitted_by": text(task.submitted_by),
        "batch_sha256": task.batch_sha256,
        "duplicates": str(task.duplicates),
        "classes": as_json(task.classes),
        "counts": as_json(task.counts),
    }


def task_from(flat: Sequence[str]) -> Task:
    """A task from names and values in turn, as Lua returns a hash."""
    fields = dict(zip(flat[::2], flat[1::2], strict=True))
    return Task(classes=json.loads(fields["classes"]), **_shared(fields))


def summary_from(values: Sequence[str | None]) -> TaskSummary:
    """A task from the values of `SUMMARY_FIELDS`."""
    fields = {name: value for name, value in zip(SUMMARY_FIELDS, values, strict=True) if value is not None}
    return TaskSummary(counts=json.loads(fields["counts"]), **_shared(fields))


def as_json(value: Any) -> str:
    """JSON of whatever a trainer measured: what JSON has no word for must not cost a finished task its result."""
    return to_json(value, inf_nan_mode="null", fallback=_plain).decode()


def text(value: str) -> str:
    """Text that Redis takes: a file name that is not UTF-8 leaves half characters in a message."""
    clean = value.encode("utf-8", "replace").decode()
    return clean if len(clean) <= LONGEST_REASON else clean[: LONGEST_REASON - 1] + "…"


def _shared(fields: Mapping[str, str]) -> dict[str, Any]:
    names = ("id", "state", "created", "updated", "submitted_by", "batch_sha256", "duplicates", "attempts")
    return {
        **{name: fields[name] for name in names},
        "cancel_requested": "cancel" in fields,
        "progress": TaskProgress.model_validate_json(fields["progress"]) if "progress" in fields else None,
        "version": fields.get("version"),
        "reason": fields.get("reason"),
        "result": json.loads(fields["result"]) if "result" in fields else None,
    }


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)  # numpy, else whatever it calls itself
